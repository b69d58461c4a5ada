from __future__ import annotations

import torch

from workers.backends.sampling.vllm.patches import add_by_row, is_slice


def test_each_row_gets_the_adapter_of_its_slot_and_none_at_minus_one():
    a, b = torch.randn(2, 1, 3, 8), torch.randn(2, 1, 5, 3)
    hidden, logits = torch.randn(4, 8), torch.zeros(4, 5)
    add_by_row(logits, hidden, a, b, torch.tensor([1, -1, 0, 1]))
    for row, slot in ((0, 1), (2, 0), (3, 1)):
        torch.testing.assert_close(logits[row], b[slot, 0] @ a[slot, 0] @ hidden[row])
    assert not logits[1].any()


def test_logits_of_a_padded_vocabulary_get_the_adapter_and_the_padding_nothing():
    a, b = torch.randn(2, 1, 3, 8), torch.randn(2, 1, 5, 3)
    hidden, logits = torch.randn(2, 8), torch.zeros(2, 64)
    add_by_row(logits, hidden, a, b, torch.tensor([1, -1]))
    torch.testing.assert_close(logits[0, :5], b[1, 0] @ a[1, 0] @ hidden[0])
    assert not logits[:, 5:].any()
    assert not logits[1].any()


def test_a_view_of_the_batch_is_told_from_a_copy_of_sampled_rows():
    batch = torch.randn(10, 4)
    assert is_slice(batch[2:5], 3)
    assert is_slice(batch[:9], 1)
    assert is_slice(batch, 1)
    assert not is_slice(batch[torch.tensor([1, 7])], 2)
