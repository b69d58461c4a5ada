"""An engine over two ranks (sampler.tensor_parallel) gives the answers of a single-rank engine.

Its model is a Qwen2: vLLM's class for it does not list lm_head among the targets of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from app.domain.sampling import UNSCORED
from tests.conformance.samplers import PROMPTS, Reference, ask, make_reference, one, opened
from tests.models import tiny_qwen2
from workers.backends.sampling.base import SamplerBackend


@pytest.fixture(scope="module")
def float32_reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tiny_qwen2(tmp_path_factory.mktemp("qwen2")))


@pytest.fixture(scope="module")
def sampler(float32_reference: Reference) -> Iterator[SamplerBackend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # one core each
        with opened("vllm on two ranks", float32_reference) as backend:
            yield backend


def test_both_ranks_are_there(sampler):
    described = sampler.describe()
    assert described["tensor_parallel"] == len(described["devices"]) == 2


@pytest.mark.parametrize("adapter", [None, "one", "two"])
def test_tokens_and_logprobs_are_those_of_the_reference(sampler, reference, adapter):
    prompt = PROMPTS[1]
    sequence = one(sampler, adapter, prompt, temperature=0.0)
    reference.assert_greedy(adapter, prompt, sequence.tokens)
    whole = np.concatenate([prompt, sequence.tokens])
    np.testing.assert_allclose(sequence.logprobs, reference.logprobs(adapter, whole)[-12:], atol=reference.atol)


def test_a_prompt_in_chunks_is_scored_alike(sampler, reference):
    output = sampler.sample("one", ask(PROMPTS[3], max_tokens=1, prompt_logprobs=True, prompt_top=3))
    np.testing.assert_allclose(output.prompt_logprobs[1:], reference.logprobs("one", PROMPTS[3]), atol=reference.atol)
    table = reference.table("one", PROMPTS[3])[:-1]
    np.testing.assert_allclose(output.prompt_top.logprobs[1:], table.topk(3).values, atol=reference.atol)
    assert (output.prompt_top.logprobs[0] == np.float32(UNSCORED)).all()
