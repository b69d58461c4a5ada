"""Preemption by sequence: a project that waits gets its share of the batch, and no sample depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.domain.sampling import SampleOutput, SampleRequest
from app.settings import BaseModelSettings
from tests.models import byte_tokenizer, tiny_qwen3
from tests.parity import architectures
from workers.backends.sampling import vocabulary
from workers.backends.sampling.base import Aborted, RequestHandle
from workers.backends.sampling.transformers import kv_cache
from workers.backends.sampling.transformers.engine import Engine
from workers.backends.sampling.transformers.jobs import Job
from workers.models import base_model, lora

ROWS = 4
LONG = 60


class Bench:
    """An engine of four rows, and requests of several projects. Calls from inside the engine's thread come between two
    tokens, so the tests know exactly what ran when."""

    def __init__(self, settings: BaseModelSettings) -> None:
        self._base, self._words = base_model.load(settings), vocabulary.load_vocabulary(settings)
        lora.wrap(self._base.model)
        kv_cache.use_decode_attention(self._base.model)
        self.engine = Engine(self._base.model, self._base.device, ROWS)
        self.tokens = Counter[str]()
        self.futures: dict[str, Future[SampleOutput]] = {}

    def begin(
        self,
        project: str,
        samples: int,
        tokens: int,
        at: dict[int, Callable[[], None]] | None = None,
        length: int = 7,
        **fields: Any,
    ) -> Future[SampleOutput]:
        """Submits a request. `at` maps numbers of the project's tokens to calls at the token of this number."""

        def on_token(index: int, ids: Sequence[int], logprobs: Sequence[float]) -> None:
            self.tokens[project] += 1
            (at or {}).pop(self.tokens[project], lambda: None)()

        prompt = np.random.default_rng(length).integers(3, 250, length).astype(np.int32)
        request = SampleRequest(prompt, samples, tokens, 11, ignore_eos=True, **fields)
        job = Job(request, "", None, self._base.info, self._words, RequestHandle(on_token, project=project))
        self.futures[project] = job.future
        self.engine.submit(job)
        return job.future


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(BaseModelSettings(name="tiny", path=str(tiny_qwen3(tmp_path)), dtype="float32"))
    yield made
    made.engine.stop()


def before_next_step(bench: Bench, call: Callable[[], None]) -> None:
    """Calls `call` once in the engine's thread, between two tokens of all rows."""
    batch = bench.engine._batch
    step = batch.step

    def once() -> None:
        del batch.step
        call()
        step()

    batch.step = once


def assert_same(one: SampleOutput, other: SampleOutput) -> None:
    """Equal tokens; logprobs may round differently beside other neighbours."""
    for mine, theirs in zip(one.sequences, other.sequences, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)


def test_a_short_request_of_another_project_ends_within_a_few_steps_of_a_long_one(bench: Bench):
    alone = bench.begin("alone", 2 * ROWS, LONG).result(60)
    counts, short = [], []

    def come() -> None:
        counts.append(bench.tokens["long"])
        short.append(bench.begin("short", 1, 5))
        short[0].add_done_callback(lambda _: counts.append(bench.tokens["long"]))

    long = bench.begin("long", 2 * ROWS, LONG, {10: come}).result(60)
    begun, ended = counts
    assert ended - begun <= ROWS * 6, f"of {2 * ROWS * LONG} tokens"
    assert_same(long, alone)
    assert_same(short[0].result(60), bench.begin("short", 1, 5).result(60))


def test_a_project_gets_its_share_of_the_rows_and_no_more(bench: Bench):
    """Of four rows each has two while both want more, and the first one goes on in all four afterwards."""
    seen: list[Counter[str]] = []

    def look() -> None:
        seen.append(Counter(row.job.handle.project for row in bench.engine._batch.live))

    second: list[Future[SampleOutput]] = []
    come = {10: lambda: second.append(bench.begin("second", 6, 20, {20: look, 60: look}))}
    first = bench.begin("first", 2 * ROWS, LONG, {**come, 2 * ROWS * LONG - 4: look})
    first.result(60)
    assert seen[:2] == [{"first": 2, "second": 2}] * 2
    assert second[0].done()
    assert seen[2]["second"] == 0


def test_a_project_with_too_many_rows_gives_up_its_own_though_others_have_fewer_tokens(bench: Bench):
    left: list[Counter[str]] = []

    def give_up() -> None:
        bench.engine._batch.set_aside({"old": 1})
        left.append(Counter(row.job.handle.project for row in bench.engine._batch.live))

    def come() -> None:
        bench.begin("new", 2, 9, {4: lambda: before_next_step(bench, give_up)})

    bench.begin("old", 2, LONG, {10: come}).result(60)
    assert left == [{"old": 1, "new": 2}]


def test_rows_go_on_though_the_prompt_they_were_set_aside_for_does_not_fit_beside_them(bench: Bench):
    alone = [bench.begin(project, count, 12).result(60) for project, count in (("one", ROWS), ("two", 1))]
    refused: list[int] = []

    def run_out(_model: object, _args: object, given: dict[str, Any]) -> None:
        unfinished = len(bench.engine._batch.live) + len(bench.engine._batch.aside)
        if given["input_ids"].shape[1] > 1 and unfinished:
            refused.append(unfinished)
            raise torch.OutOfMemoryError("CUDA out of memory")

    bench._base.model.register_forward_pre_hook(run_out, with_kwargs=True)
    short: list[Future[SampleOutput]] = []
    long = bench.begin("long", ROWS, 12, {10: lambda: short.append(bench.begin("short", 1, 12))})
    assert_same(long.result(60), alone[0])
    assert_same(short[0].result(60), alone[1])
    assert refused == sorted(set(refused), reverse=True), "it is tried again only after a row has ended"
    assert refused[0] == ROWS


def test_rows_go_on_with_the_same_bits_after_they_were_set_aside(bench: Bench):
    """Alone before and after, in the same rows: not even rounding may differ."""
    alone = bench.begin("alone", ROWS, LONG, sample_top=3).result(60)

    def aside_and_back() -> None:
        bench.engine._batch.set_aside({"long": ROWS - 1})
        chosen = bench.engine._batch.choose({"long": ROWS})
        assert chosen == bench.engine._batch.aside and len(chosen) == ROWS - 1
        bench.engine._batch.join(chosen)

    def come() -> None:
        before_next_step(bench, aside_and_back)

    again = bench.begin("long", ROWS, LONG, {30: come, 90: come}, sample_top=3).result(60)
    for mine, theirs in zip(again.sequences, alone.sequences, strict=True):
        assert mine.tokens.tobytes() == theirs.tokens.tobytes()
        assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()
        assert mine.top.logprobs.tobytes() == theirs.top.logprobs.tobytes()


@pytest.mark.parametrize("architecture", ["qwen3.5", "inkling", "deepseek-v3.2"])
def test_every_kind_of_state_is_kept_while_a_row_is_set_aside(tmp_path: Path, architecture: str):
    folder = architectures.build(architecture, tmp_path)
    byte_tokenizer().save_pretrained(folder)
    bench = Bench(BaseModelSettings(name="tiny", path=str(folder), dtype="float32"))
    try:
        alone = bench.begin("alone", ROWS, 30).result(60)
        long = bench.begin("long", ROWS, 30, {10: lambda: bench.begin("short", 2, 9, length=20)}).result(60)
        assert_same(long, alone)
    finally:
        bench.engine.stop()


def test_an_aborted_request_leaves_no_row_set_aside(bench: Bench):
    def abort() -> None:
        assert bench.engine._batch.aside
        bench.futures["long"].set_exception(Aborted("gone"))

    long = bench.begin("long", ROWS, LONG, {8: lambda: bench.begin("other", ROWS, 3, {2: abort})})
    with pytest.raises(Aborted):
        long.result(60)
    assert bench.begin("next", 1, 3).result(60)
    bench.engine.when_idle(lambda: None)
    assert not bench.engine._batch.aside


def test_several_projects_at_once_have_the_samples_that_they_have_alone(bench: Bench):
    asks = {"a": (9, 30, 5), "b": (3, 20, 40), "c": (1, 45, 3), "d": (5, 6, 17)}

    def begin(name: str) -> Future[SampleOutput]:
        samples, tokens, length = asks[name]
        return bench.begin(name, samples, tokens, length=length)

    alone = {name: begin(name).result(60) for name in asks}
    together = {name: begin(name) for name in asks}
    for name, output in alone.items():
        assert_same(together[name].result(60), output)
