"""Scoring of a prompt that vLLM runs in chunks, in its workers. tests/conformance checks the complete path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.domain import ops
from app.domain.sampling import SampleRequest
from workers.backends.sampling.token_sampler import output
from workers.backends.sampling.vllm import requests as vllm_requests
from workers.backends.sampling.vllm.requests import LENGTH_KEY, SCORES_KEY, PromptInChunks

CPU = torch.device("cpu")
LENGTH = 1000
HIDDEN = torch.randn(LENGTH, 4, generator=torch.Generator().manual_seed(1))
HEAD = torch.randn(4, 30, generator=torch.Generator().manual_seed(2))
TABLE = (HIDDEN @ HEAD).log_softmax(-1).numpy()
PROMPT = np.random.default_rng(3).integers(0, 30, LENGTH).astype(np.int32)
WHOLE = SampleRequest(PROMPT, 1, 1, 7, prompt_logprobs=True)
LAST = SampleRequest(PROMPT, 1, 1, 7, prompt_logprobs=True, prompt_last_n=100)


class Head:
    """The model's head; records the number of rows of each call."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        self.rows.append(len(hidden))
        return hidden @ HEAD


def run(request: SampleRequest, head: Head, *ends: int, begin: int = 0) -> list[Tensor | None]:
    prompt = PromptInChunks(request, CPU, ends[-1])
    return [prompt.add(a, HIDDEN[a:b], head) for a, b in zip([begin, *ends], ends, strict=False)]


def check(request: SampleRequest, flat: Tensor | None) -> None:
    assert flat is not None
    found = output(request, [], flat.numpy()).prompt_logprobs
    own = TABLE[np.arange(LENGTH - 1), PROMPT[1:]]
    last = request.prompt_last_n or LENGTH - 1
    np.testing.assert_allclose(found[-last:], own[-last:], atol=1e-5)


@pytest.mark.parametrize("ends", [(1000,), (512, 1000), (1, 2, 999, 1000), (300, 999, 1000), (999,), (300, 999)])
@pytest.mark.parametrize("request_", [WHOLE, LAST], ids=["whole", "last 100"])
def test_a_prompt_in_chunks_is_scored_once_when_its_last_is_in(request_, ends):
    head = Head()
    *before, last = run(request_, head, *ends)
    assert before == [None] * (len(ends) - 1)
    check(request_, last)
    assert sum(head.rows) == (request_.prompt_last_n or LENGTH - 1)
    assert max(head.rows) <= 256


def test_decoding_and_a_second_run_of_the_prompt_give_nothing_more():
    prompt = PromptInChunks(WHOLE, CPU, LENGTH)
    check(WHOLE, prompt.add(0, HIDDEN, Head()))
    assert prompt.add(LENGTH, HIDDEN[:1], Head()) is None
    assert prompt.add(0, HIDDEN, Head()) is None


def test_a_prompt_preempted_in_the_middle_goes_on_where_it_was():
    prompt, head = PromptInChunks(WHOLE, CPU, LENGTH), Head()
    assert prompt.add(0, HIDDEN[:600], head) is None
    assert prompt.add(0, HIDDEN[:400], head) is None
    check(WHOLE, prompt.add(400, HIDDEN[400:], head))
    assert sum(head.rows) == LENGTH - 1


def test_rows_left_out_by_the_prefix_cache_are_never_made_up():
    check(LAST, run(LAST, Head(), 1000, begin=896)[0])
    assert run(LAST, Head(), 1000, begin=960) == [None]
    assert run(WHOLE, Head(), 512, 1000, begin=128) == [None, None]


class FirstRunner:
    """The hooked parts of vLLM's first model runner; if `asynchronous`, a step's output is inside another."""

    asynchronous = False
    device = CPU

    def __init__(self, states: dict[str, Any]) -> None:
        self.requests = states
        self.model = SimpleNamespace(compute_logits=Head())
        self.input_batch = SimpleNamespace(req_id_to_index={name: i for i, name in enumerate(states)})
        self.query_start_loc = SimpleNamespace(np=np.array([0, 5]))

    def sample_tokens(self, scheduled: dict[str, int]) -> Any:
        hidden = torch.cat([HIDDEN[:5], HIDDEN[: scheduled["ours"]]])
        self._get_prompt_logprobs_dict(hidden, scheduled)
        output = SimpleNamespace(prompt_token_id_logprobs_dict={})
        return SimpleNamespace(_model_runner_output=output) if self.asynchronous else output

    def _get_prompt_logprobs_dict(self, hidden: Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        return {}


def extra_args(request: SampleRequest) -> dict[str, Any]:
    return {SCORES_KEY: ops.encode(request), LENGTH_KEY: LENGTH}


def params(request: SampleRequest | None) -> Any:
    return SimpleNamespace(extra_args=None if request is None else extra_args(request))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_first_runner_gives_the_scores_of_our_requests_with_its_output(asynchronous):
    runner_class = type("Runner", (FirstRunner,), {"asynchronous": asynchronous})
    vllm_requests._install_first(runner_class)
    others, ours = (
        SimpleNamespace(sampling_params=params(request), num_computed_tokens=0) for request in (None, WHOLE)
    )
    runner = runner_class({"others": others, "ours": ours})
    found = runner.sample_tokens({"others": 5, "ours": LENGTH})
    scores = getattr(found, "_model_runner_output", found).prompt_token_id_logprobs_dict
    assert list(scores) == ["ours"]
    check(WHOLE, scores["ours"])
    ours.num_computed_tokens = LENGTH
    later = runner.sample_tokens({"others": 5, "ours": 1})
    assert getattr(later, "_model_runner_output", later).prompt_token_id_logprobs_dict == {}


LENGTHS = np.array([0, LENGTH, 5, 0])  # of the prompts: "others" is in slot 2, "ours" in slot 1


def second_worker() -> Any:
    """vLLM's worker for prompt scores in its second model runner, with a request of others and one of ours."""
    prompt_logprob = pytest.importorskip("vllm.v1.worker.gpu.sample.prompt_logprob")
    vllm_params = pytest.importorskip("vllm").SamplingParams
    worker_class = type("Worker", (prompt_logprob.PromptLogprobsWorker,), {})
    vllm_requests._install_second(worker_class)
    worker = worker_class(4, CPU)
    worker.add_request("others", 2, vllm_params())
    worker.add_request("ours", 1, vllm_params(extra_args=extra_args(WHOLE)))
    return worker


def second_step(worker: Any, begin: int, count: int, prefill: int = LENGTH) -> dict[str, Tensor]:
    """Runs `count` tokens of ours from `begin` on. Its prefill has `prefill` tokens: after a preemption, more than its
    prompt."""
    batch = SimpleNamespace(
        req_ids=["others", "ours"],
        idx_mapping_np=np.array([2, 1]),
        query_start_loc_np=np.array([0, 5, 5 + count]),
        num_scheduled_tokens=np.array([5, count]),
        num_computed_prefill_tokens_np=np.array([0, begin]),
        prefill_len_np=np.array([5, prefill]),
    )
    hidden = torch.cat([HIDDEN[:5], HIDDEN[begin : begin + count]])
    found: dict[str, Tensor] = worker.compute_prompt_token_id_logprobs(Head(), hidden, batch, LENGTHS)
    return found


def test_the_second_runners_worker_scores_our_requests_and_forgets_them():
    worker = second_worker()
    assert second_step(worker, 0, 600) == {}
    check(WHOLE, second_step(worker, 600, 400)["ours"])
    worker = second_worker()
    assert second_step(worker, 0, 600) == {}
    worker.remove_request("ours")
    assert second_step(worker, 600, 400) == {}


def test_the_second_runners_worker_scores_no_request_again_that_was_preempted_after_its_first_token():
    """The scores went out with that token. This step ends the prompt but not the prefill, so it gives no token, and
    vLLM's scheduler dies of scores without one."""
    assert second_step(second_worker(), 0, LENGTH, prefill=LENGTH + 2) == {}
