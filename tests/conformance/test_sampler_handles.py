"""Token events and cancellation of a request through its RequestHandle, in both samplers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.domain.sampling import SampleOutput
from app.errors import ServerOpError
from tests.conformance.samplers import PROMPTS, ask, one, tokens_of
from tests.unit.workers.conftest import await_true
from workers.backends.sampling.base import Aborted, RequestHandle

# On a busy machine a request may be over before the test sees it, but not every time.
TRIES = 5


class Seen:
    """Records the sampled tokens of each sample."""

    def __init__(self) -> None:
        self.calls = 0
        self.begun = threading.Event()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[float]] = defaultdict(list)

    def __call__(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.calls += 1
        self.tokens[index] += tokens
        self.logprobs[index] += logprobs
        self.begun.set()


def all_of(output: SampleOutput) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    return (
        {i: sequence.tokens.tolist() for i, sequence in enumerate(output.sequences)},
        {i: sequence.logprobs.tolist() for i, sequence in enumerate(output.sequences)},
    )


def test_tokens_are_reported_as_they_come_and_are_those_of_the_answer(sampler):
    request = ask(PROMPTS[1], num_samples=3, max_tokens=20, prompt_logprobs=True, sample_top=2)
    for _ in range(TRIES):
        seen = Seen()
        output = sampler.sample("one", request, RequestHandle(seen))
        assert (seen.tokens, seen.logprobs) == all_of(output)
        if seen.calls > 3:
            break
    assert seen.calls > 3, "it came at once, every time"
    unseen = sampler.sample("one", request)
    assert all_of(unseen)[0] == seen.tokens
    assert output.prompt_logprobs[1:].tolist() == pytest.approx(unseen.prompt_logprobs[1:].tolist(), abs=1e-4)
    assert [s.top.tokens.shape for s in output.sequences] == [(20, 2)] * 3


def test_each_sample_that_ends_is_reported_before_the_answer(sampler):
    ended: list[None] = []
    sampler.sample(
        "one", ask(PROMPTS[1], num_samples=3, max_tokens=5), RequestHandle(on_end=lambda: ended.append(None))
    )
    assert len(ended) == 3


def test_a_token_that_stops_a_sample_is_reported_too(sampler, reference):
    expected = reference.greedy(None, PROMPTS[1], 12)
    seen = Seen()
    sampler.sample(None, ask(PROMPTS[1], temperature=0.0, stop_tokens=(expected[5],)), RequestHandle(seen))
    assert seen.tokens[0] == expected[: expected.index(expected[5]) + 1]


def test_an_aborted_request_ends_and_no_other_does(sampler, reference):
    for _ in range(TRIES):
        seen, beside = Seen(), Seen()
        handle = RequestHandle(seen)
        with ThreadPoolExecutor(2) as pool:
            long = pool.submit(sampler.sample, "one", ask(PROMPTS[0], num_samples=8, max_tokens=240), handle)
            other = pool.submit(
                sampler.sample, "two", ask(PROMPTS[1], temperature=0.0, max_tokens=60), RequestHandle(beside)
            )
            assert seen.begun.wait(240)
            assert beside.begun.wait(240)
            handle.abort()
            error = long.exception(240)
            assert other.result(240).sequences[0].tokens.tolist() == reference.greedy("two", PROMPTS[1], 60)
        if error is not None:
            break
    assert isinstance(error, Aborted)
    assert sum(map(len, seen.tokens.values())) < 8 * 240
    one(sampler, "one", PROMPTS[0])  # tokens under way at the abort have arrived by now
    before = seen.calls
    assert len(one(sampler, "one", PROMPTS[0], max_tokens=100).tokens) == 100
    assert seen.calls == before
    assert sampler.healthy()


@pytest.mark.parametrize("streams", [True, False])
def test_what_an_aborted_request_drew_is_known(sampler, streams):
    for _ in range(TRIES):
        seen = Seen()
        handle, beside = RequestHandle(seen if streams else None), RequestHandle(Seen())
        with ThreadPoolExecutor(2) as pool:
            stopped = pool.submit(sampler.sample, "one", ask(PROMPTS[0], num_samples=2, max_tokens=240), handle)
            await_true(seen.begun.is_set if streams else lambda has=handle: has._callbacks, "the engine never had it")
            pool.submit(sampler.sample, "one", ask(PROMPTS[0], max_tokens=60), beside).result(240)
            handle.abort()
            error = stopped.exception(240)
        if error is not None:
            break
    assert isinstance(error, Aborted)
    assert 10 < handle.sampled_tokens < 2 * 240, "another drew 60 beside it"
    assert sum(map(len, seen.tokens.values())) <= handle.sampled_tokens


def test_a_request_that_ends_took_what_it_answers(sampler):
    handle = RequestHandle()
    output = sampler.sample("one", ask(PROMPTS[1], num_samples=3, max_tokens=9), handle)
    assert handle.sampled_tokens == sum(len(sequence.tokens) for sequence in output.sequences) == 27
    assert handle.cached_tokens == output.cached_tokens


def test_a_short_request_of_another_project_does_not_wait_for_a_long_one(sampler):
    """The long one has 64 samples for 16 rows; it goes on with the same tokens."""
    long, short = ask(PROMPTS[0], num_samples=64, max_tokens=60), ask(PROMPTS[1], max_tokens=4)
    alone = sampler.sample("one", long)
    expected = sampler.sample("two", short)
    for _ in range(TRIES):
        seen = Seen()
        with ThreadPoolExecutor(2) as pool:
            running = pool.submit(sampler.sample, "one", long, RequestHandle(seen, project="long"))
            assert seen.begun.wait(240)
            drawn = sum(map(len, seen.tokens.values()))
            beside = sampler.sample("two", short, RequestHandle(project="short"))
            drawn = sum(map(len, seen.tokens.values())) - drawn
            assert tokens_of(running.result(240)) == tokens_of(alone)
        assert tokens_of(beside) == tokens_of(expected)
        if drawn < 64 * 60 / 4:
            break
    assert drawn < 64 * 60 / 4, "the samples that ran at first take a quarter of all tokens"


def test_a_request_aborted_while_it_waits_never_starts_and_the_one_behind_it_does(sampler, reference):
    running, waiting = Seen(), Seen()
    handles = [RequestHandle(running), RequestHandle(waiting)]
    with ThreadPoolExecutor(3) as pool:
        # 512 samples of 16 at a time, which takes far longer than the rest.
        first = pool.submit(sampler.sample, None, ask(PROMPTS[0], num_samples=512, max_tokens=200), handles[0])
        assert running.begun.wait(240)
        second = pool.submit(sampler.sample, None, ask(PROMPTS[0]), handles[1])
        third = pool.submit(one, sampler, "one", PROMPTS[1], temperature=0.0)
        handles[1].abort()
        with pytest.raises(Aborted):
            second.result(240)
        assert not first.done()
        handles[0].abort()
        with pytest.raises(Aborted):
            first.result(240)
        assert third.result(240).tokens.tolist() == reference.greedy("one", PROMPTS[1], 12)
    assert waiting.calls == 0


def test_a_handle_aborted_before_the_call_keeps_it_from_starting(sampler):
    seen = Seen()
    handle = RequestHandle(seen)
    handle.abort()
    with pytest.raises(Aborted):
        sampler.sample(None, ask(PROMPTS[0]), handle)
    assert len(one(sampler, None, PROMPTS[0]).tokens) == 12
    assert seen.calls == 0


def test_aborting_behind_the_end_changes_nothing(sampler):
    handle = RequestHandle()
    before = sampler.sample(None, ask(PROMPTS[0]), handle).sequences[0].tokens.tolist()
    handle.abort()
    handle.abort()
    assert one(sampler, None, PROMPTS[0]).tokens.tolist() == before


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_listener_that_fails_fails_its_own_request_alone_which_is_not_its_users_fault(sampler, reference, kind):
    def fail(index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        raise kind("the listener is gone")

    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(sampler.sample, None, ask(PROMPTS[0]), RequestHandle(fail))
        good = pool.submit(one, sampler, "one", PROMPTS[1], temperature=0.0)
        with pytest.raises(ServerOpError, match="the listener is gone"):
            bad.result(240)
        assert good.result(240).tokens.tolist() == reference.greedy("one", PROMPTS[1], 12)
    assert sampler.healthy()
