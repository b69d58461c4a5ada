"""Memory that is short while rows join or decode: rows give up their columns, and no sample depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from app.errors import ServerOpError
from app.settings import BaseModelSettings
from tests.models import byte_tokenizer, tiny_qwen3
from tests.parity import architectures
from tests.unit.workers.backends.sampling.transformers.test_preemption import ROWS, Bench, assert_same, before_next_step
from workers.backends.sampling.base import Aborted
from workers.backends.sampling.token_sampler import TokenSampler
from workers.backends.sampling.transformers import kv_cache

LONG = 30


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(BaseModelSettings(name="tiny", path=str(tiny_qwen3(tmp_path)), dtype="float32"))
    yield made
    made.engine.stop()


class Shortage:
    """Stands in for a device without memory. Counts what it refuses."""

    def __init__(self, runs_out: Callable[..., bool], error: Exception | None = None) -> None:
        self.refused = 0
        self._runs_out = runs_out
        self._error = error or torch.OutOfMemoryError("CUDA out of memory")

    def check(self, *args: Any) -> None:
        if self._runs_out(*args):
            self.refused += 1
            raise self._error

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` with a check of its arguments before it."""

        def checked(*args: Any, **named: Any) -> Any:
            self.check(*args)
            return function(*args, **named)

        return checked


def once(runs_out: Callable[..., bool]) -> Callable[..., bool]:
    """Returns a function that is true at the first call at which `runs_out` is."""
    done: list[bool] = []

    def first(*args: Any) -> bool:
        if not done and runs_out(*args):
            done.append(True)
            return True
        return False

    return first


def on_decode(bench: Bench, shortage: Shortage) -> None:
    """Checks the number of rows before each decode pass."""

    def check(_model: object, _args: object, given: dict[str, Any]) -> None:
        if given["input_ids"].shape[1] == 1:
            shortage.check(len(given["input_ids"]))

    bench._base.model.register_forward_pre_hook(check, with_kwargs=True)


def arranges_more_than(rows: int) -> Callable[[Sequence[kv_cache.Part], int], bool]:
    return lambda parts, _width: sum(len(part.rows) for part in parts) > rows


def assert_runs_as_alone(bench: Bench, shortage: Shortage, begin: Callable[[], object]) -> None:
    """Two projects' requests run alone, and then together while memory is short from the call of `begin` on."""
    alone = [bench.begin(f"{project} alone", 3, LONG).result(60) for project in ("one", "two")]
    begin()
    one = bench.begin("one", 3, LONG, {20: lambda: bench.begin("two", 3, LONG)}).result(60)
    assert_same(one, alone[0])
    assert_same(bench.futures["two"].result(60), alone[1])
    assert 1 <= shortage.refused <= 3, "it does not try again before fewer rows are to run"
    assert bench.engine.alive
    assert bench.tokens["one"] == bench.tokens["two"] == 3 * LONG, "each token is given once"


@pytest.mark.parametrize("rows", [1, 2, ROWS - 1])
def test_rows_that_memory_is_too_small_for_join_when_others_have_ended(bench, monkeypatch, rows):
    shortage = Shortage(arranges_more_than(rows))
    arrange = shortage.before(kv_cache.arrange)
    assert_runs_as_alone(bench, shortage, lambda: monkeypatch.setattr(kv_cache, "arrange", arrange))


@pytest.mark.parametrize("rows", [1, 2, ROWS - 1])
def test_fewer_rows_decode_together_when_memory_is_too_small_for_all(bench, rows):
    shortage = Shortage(lambda count: count > rows)
    assert_runs_as_alone(bench, shortage, lambda: on_decode(bench, shortage))


@pytest.mark.parametrize("error", [None, torch.AcceleratorError("CUDA error: out of memory\nSearch for it")])
def test_a_step_without_memory_is_repeated(bench, error):
    shortage = Shortage(once(lambda count: count == ROWS), error)
    assert_runs_as_alone(bench, shortage, lambda: on_decode(bench, shortage))
    assert shortage.refused == 1


def test_a_row_that_memory_is_too_small_to_set_aside_goes_on_later(bench, monkeypatch):
    shortage = Shortage(
        once(lambda parts, _width: len(parts) == len(parts[0].rows) == 1 < len(bench.engine._batch.live))
    )
    arrange = shortage.before(kv_cache.arrange)
    assert_runs_as_alone(bench, shortage, lambda: monkeypatch.setattr(kv_cache, "arrange", arrange))


@pytest.mark.parametrize("place", ["columns", "sampler"])
@pytest.mark.parametrize("architecture", ["qwen3.5", "inkling", "deepseek-v3.2"])
def test_every_kind_of_state_is_made_again_after_a_step_that_ended_midway(tmp_path, monkeypatch, architecture, place):
    """In the sampler the step's own states are written already; in a layer's columns those of the layers before."""
    folder = architectures.build(architecture, tmp_path)
    byte_tokenizer().save_pretrained(folder)
    bench = Bench(BaseModelSettings(name="tiny", path=str(folder), dtype="float32"))
    calls: list[object] = []

    def at_twentieth(*_: object) -> bool:
        calls.append(None)
        return len(calls) == 20

    def begin() -> None:
        owner, name = (kv_cache._Columns, "append") if place == "columns" else (TokenSampler, "sample")
        monkeypatch.setattr(owner, name, shortage.before(getattr(owner, name)))

    shortage = Shortage(at_twentieth)
    try:
        assert_runs_as_alone(bench, shortage, begin)
    finally:
        bench.engine.stop()


def test_a_sequence_that_memory_is_too_small_for_alone_fails_alone(bench):
    alone = bench.begin("alone", 1, 12).result(60)
    shortage = Shortage(lambda _count: len(bench.engine._batch.live[0].tokens) > 12)
    on_decode(bench, shortage)
    long, short = bench.begin("long", 1, LONG), bench.begin("short", 1, 12)
    assert_same(short.result(60), alone)
    with pytest.raises(ServerOpError, match=r"memory ran out.*20 tokens"):
        long.result(60)
    assert_same(bench.begin("next", 1, 12).result(60), alone)


def test_a_request_is_sampled_when_memory_is_too_small_to_sample_its_first_tokens_beside_others(bench, monkeypatch):
    shortage = Shortage(once(lambda _self, logits, _uniforms: len(logits) == 3 and len(bench.engine._batch.live) == 3))
    sample = shortage.before(TokenSampler.sample)
    assert_runs_as_alone(bench, shortage, lambda: monkeypatch.setattr(TokenSampler, "sample", sample))


def test_a_row_goes_on_when_memory_runs_out_while_ended_rows_of_its_request_hold_the_rest(bench, monkeypatch):
    words = [sequence.tokens.tolist() for sequence in bench.begin("free", ROWS, LONG).result(60).sequences]
    stops = tuple(word[4] for word in words[1:])
    alone = bench.begin("alone", ROWS, LONG, stop_tokens=stops).result(60)
    assert [len(sequence.tokens) for sequence in alone.sequences] == [LONG, 5, 5, 5], "three end in one step"

    shortage = Shortage(lambda *_: len(bench.engine._batch.live) == 1 < len(bench.engine._batch._rows))
    monkeypatch.setattr(kv_cache, "arrange", shortage.before(kv_cache.arrange))
    on_decode(bench, shortage)
    assert_same(bench.begin("one", ROWS, LONG, stop_tokens=stops).result(60), alone)
    assert shortage.refused == 2, "to drop the ended rows, and to decode beside them"


def test_a_row_goes_on_when_memory_runs_out_while_rows_set_aside_hold_the_rest(bench):
    alone = bench.begin("alone", 2, LONG).result(60)

    def run_out() -> None:
        bench.engine._batch.set_aside({"one": 1})
        raise torch.OutOfMemoryError("CUDA out of memory")

    one = bench.begin("one", 2, LONG, {20: lambda: before_next_step(bench, run_out)})
    assert_same(one.result(60), alone)


def test_a_request_joins_though_memory_runs_out_while_rows_of_a_cancelled_one_hold_it(bench, monkeypatch):
    alone = bench.begin("alone", 1, LONG).result(60)
    shortage = Shortage(lambda *_: bool(bench.engine._batch._rows) and not bench.engine._batch.live)
    monkeypatch.setattr(kv_cache, "arrange", shortage.before(kv_cache.arrange))
    cancel = {1: lambda: bench.futures["one"].set_exception(Aborted("gone"))}
    bench.begin("one", ROWS - 1, LONG, {20: lambda: bench.begin("two", 1, LONG, cancel)})
    with pytest.raises(Aborted):
        bench.futures["one"].result(60)
    assert_same(bench.futures["two"].result(60), alone)
    assert shortage.refused == 1


def test_rows_set_aside_go_on_when_all_that_run_are_cancelled_while_memory_runs_out(bench, monkeypatch):
    """Four projects want the four rows: "a" runs two and has to give one up, and "b" has two set aside."""
    alone = bench.begin("alone", ROWS, 12).result(60)

    def run_out(parts: Sequence[kv_cache.Part], _width: int) -> bool:
        if len(parts) != 1 or len(parts[0].rows) != 1 or bench.futures["a"].done():
            return False
        assert [len(bench.engine._batch.live), len(bench.engine._batch.aside)] == [2, 2]
        bench.futures["a"].set_exception(Aborted("gone"))
        return True

    shortage = Shortage(run_out)

    def come() -> None:
        monkeypatch.setattr(kv_cache, "arrange", shortage.before(kv_cache.arrange))
        for project in ("c", "d"):
            bench.begin(project, 1, 12)

    # At its 28th token two rows of "b" end.
    b = bench.begin("b", ROWS, 12, {8: lambda: bench.begin("a", 2, LONG), 28: come})
    assert_same(b.result(60), alone)
    for project in ("c", "d"):
        assert bench.futures[project].result(60)
    assert shortage.refused == 1
