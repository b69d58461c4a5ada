from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.backends.sampling.transformers.kv_cache import decode_attention

ROWS, HEADS, KV_HEADS, WIDTH, COLUMNS = 5, 6, 2, 16, 37
# transformers' own function reads the number of heads that share one from the module.
MODULE = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_rows_see_the_columns_their_mask_shows_as_in_torchs_own(dtype, bound, tokens, scaling):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query, key, value = drawn(ROWS, HEADS, tokens, WIDTH), *(drawn(ROWS, KV_HEADS, COLUMNS, WIDTH) for _ in range(2))
    starts = torch.tensor([0, 3, 36 - tokens, 9, 20])
    mask = (torch.arange(COLUMNS) >= starts[:, None])[:, None, None].expand(ROWS, 1, tokens, COLUMNS)
    found, _ = decode_attention(MODULE, query, key, value, mask, scaling=scaling)
    expected = scaled_dot_product_attention(
        query.double(), key.double(), value.double(), mask, scale=scaling, enable_gqa=True
    )
    assert found.dtype is dtype
    assert (found.double() - expected.transpose(1, 2)).abs().max() < bound
