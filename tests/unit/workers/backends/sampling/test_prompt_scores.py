from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from app.domain.sampling import UNSCORED, Cells, SampleOutput, SampleRequest
from app.errors import ServerOpError
from workers.backends.sampling.base import sample_seed
from workers.backends.sampling.token_sampler import PromptScorer, output

CPU = torch.device("cpu")
LENGTH, VOCAB = 100, 50
LOGITS = torch.randn(LENGTH - 1, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
TABLE = LOGITS.log_softmax(-1)
PROMPT = np.random.default_rng(0).integers(0, VOCAB, LENGTH).astype(np.int32)
RAGGED = Cells(np.array([3, -1, 49, 0]), np.array([0] * 41 + [3] * 58 + [4]), 9, np.array([8, 0, 1, 2]))
ALL: dict[str, Any] = {
    "prompt_logprobs": True,
    "prompt_last_n": 30,
    "prompt_top": 4,
    "prompt_targets": RAGGED,
    "prompt_alternatives": 5,
}


def score(cuts: list[int], dtype: torch.dtype = torch.float32, **fields: Any) -> SampleOutput:
    """Scores of LOGITS, given in pieces that end at `cuts`."""
    request = SampleRequest(PROMPT, 1, 1, 7, **fields)
    scorer = PromptScorer(request, CPU)
    for begin, end in zip([scorer.first_row, *cuts], [*cuts, LENGTH - 1], strict=True):
        scorer.add(begin, LOGITS[begin:end].to(dtype))
    return output(request, [], scorer.flat().numpy())


def test_every_score_is_found_whatever_the_pieces():
    for cuts in ([], [1], [40, 41, 98]):
        found = score(cuts, **ALL)
        own = TABLE[np.arange(LENGTH - 1), PROMPT[1:]].numpy()
        assert np.isnan(found.prompt_logprobs[:70]).all()
        np.testing.assert_allclose(found.prompt_logprobs[70:], own[69:], atol=1e-5)
        assert (found.prompt_top.logprobs[:70] == np.float32(UNSCORED)).all()
        assert not found.prompt_top.tokens[:70].any()
        assert found.prompt_top.tokens[70:].tolist() == TABLE[69:].topk(4).indices.tolist()
        wanted_targets = [TABLE[40, 3], 0, TABLE[40, 49], TABLE[98, 0]]
        np.testing.assert_allclose(found.prompt_targets.values, wanted_targets, atol=1e-5)
        drawn = found.prompt_alternatives
        assert drawn.tokens.shape == (99, 5)
        np.testing.assert_allclose(drawn.logprobs, np.take_along_axis(TABLE.numpy(), drawn.tokens, 1), atol=1e-5)
        assert drawn.tokens.tolist() == score([50], **ALL).prompt_alternatives.tokens.tolist()


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ({"prompt_logprobs": True}, 0),
        ({"prompt_top": 1}, 0),
        ({"prompt_logprobs": True, "prompt_last_n": 30}, 69),
        ({"prompt_targets": RAGGED}, 40),
        ({"prompt_logprobs": True, "prompt_last_n": 30, "prompt_targets": RAGGED}, 40),
        (ALL, 0),
    ],
)
def test_rows_before_the_first_that_is_asked_for_are_not_needed(fields, row):
    assert PromptScorer(SampleRequest(PROMPT, 1, 1, 7, **fields), CPU).first_row == row


def test_bfloat16_logits_are_normalised_in_float32():
    exact = LOGITS.bfloat16().double().log_softmax(-1).topk(4).values
    np.testing.assert_allclose(score([], torch.bfloat16, prompt_top=4).prompt_top.logprobs[1:], exact, atol=1e-5)


def test_only_what_is_asked_of_the_prompt_needs_its_logits():
    assert not SampleRequest(PROMPT, 1, 1, 7, sample_top=3).scores_prompt
    assert not SampleRequest(PROMPT[:1], 1, 1, 7, **(ALL | {"prompt_targets": None})).scores_prompt
    for name, value in ALL.items():
        if name != "prompt_last_n":
            assert SampleRequest(PROMPT, 1, 1, 7, **{name: value}).scores_prompt


def test_alternatives_have_random_numbers_of_their_own():
    """A sample that followed the alternatives would tell nothing that they do not."""
    request = SampleRequest(PROMPT, 1, 1, 7, prompt_alternatives=1)
    scorer = PromptScorer(request, CPU)
    scorer.add(0, torch.zeros(LENGTH - 1, 1000))
    found = output(request, [], scorer.flat().numpy()).prompt_alternatives.tokens[:, 0]
    for index in range(3):
        of_sample = np.random.default_rng(sample_seed(7, index)).random(LENGTH - 1)
        assert np.mean(found == (of_sample * 1000).astype(np.int64)) < 0.1


def test_scores_that_are_missing_are_never_made_up():
    with pytest.raises(ServerOpError, match="no scores"):
        output(SampleRequest(PROMPT, 1, 1, 7, prompt_top=1), [], None)
    assert output(SampleRequest(PROMPT, 1, 1, 7), [], None).prompt_top is None
