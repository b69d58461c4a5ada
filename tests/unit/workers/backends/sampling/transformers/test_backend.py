"""Failures and sizes of the engine. tests/conformance checks its results."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.domain.ops import LoraSpec
from app.domain.sampling import SampleRequest
from app.errors import ServerOpError, Unavailable
from app.settings import BaseModelSettings, SamplerSettings
from tests.models import tiny_qwen3
from tests.unit.workers.conftest import await_true
from workers.backends import failures
from workers.backends.sampling.base import Aborted, RequestHandle
from workers.backends.sampling.transformers.backend import Adapters, TransformersSampler
from workers.models import full_weights, lora, peft_files
from workers.models.adapter import Adapter
from workers.models.full_weights import tensors_in

POISON = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("base"))


@pytest.fixture
def sampler(folder):
    settings = BaseModelSettings(
        name="tiny", path=str(folder), dtype="float32", sampler=SamplerSettings(max_batch=8, backend="transformers")
    )
    backend = TransformersSampler(settings)
    backend.open()
    yield backend
    backend.close()


def ask(*prompt: int, **fields) -> SampleRequest:
    fields = {"num_samples": 1, "max_tokens": 6, "seed": 3, "ignore_eos": True, **fields}
    return SampleRequest(prompt=np.array(prompt, np.int32), **fields)


def on_forward(sampler: TransformersSampler, check) -> None:
    """Calls `check(input_ids)` before every forward pass of the sampler's own model."""
    sampler._base.model.register_forward_pre_hook(lambda _m, _a, given: check(given["input_ids"]), with_kwargs=True)


def hold(sampler: TransformersSampler, until) -> None:
    """Blocks every decode pass until `until` is true, so that no request ends before its client or another request."""
    on_forward(sampler, lambda input_ids: await_true(until, "a pass goes on") if input_ids.shape[1] == 1 else None)


def refuse_poison(input_ids: torch.Tensor) -> None:
    if input_ids.shape[1] > 1 and (input_ids == POISON).any():
        raise RuntimeError("out of memory")


def test_a_prompt_that_cannot_run_fails_alone_though_it_shares_a_pass(sampler):
    on_forward(sampler, refuse_poison)
    with ThreadPoolExecutor(12) as pool:
        bad = [pool.submit(sampler.sample, None, ask(1, POISON, num_samples=20)) for _ in range(4)]
        good = [pool.submit(sampler.sample, None, ask(1, token)) for token in range(8)]
        assert [len(future.result(60).sequences[0].tokens) for future in good] == [6] * 8
        for future in bad:
            with pytest.raises(ServerOpError, match="out of memory"):
                future.result(60)
    assert sampler.healthy()


def test_a_prompt_for_which_memory_is_too_small_waits_until_the_others_have_ended(sampler):
    """A later prompt starts no earlier than the one that waits for memory."""
    engine, prompts, behind = sampler._engine, [], []

    def run_out(input_ids: torch.Tensor) -> None:
        if input_ids.shape[1] > 1:
            fits = not (input_ids == POISON).any() or not engine._batch.live
            prompts.append((sorted(input_ids[:, 1].tolist()), fits))
            if not fits:
                raise torch.OutOfMemoryError("CUDA out of memory")

    def come(*_: object) -> None:
        """Both come between the first two tokens of the long one."""
        for token in (POISON, 3) if not behind else ():
            behind.append(pool.submit(sampler.sample, None, ask(1, token)))
            await_true(lambda: len(engine._waiting) == len(behind), "it waits")

    on_forward(sampler, run_out)
    with ThreadPoolExecutor(2) as pool:
        long = sampler.sample(None, ask(1, 2, max_tokens=50), RequestHandle(come))
        assert [len(future.result(60).sequences[0].tokens) for future in behind] == [6, 6]
    assert len(long.sequences[0].tokens) == 50
    assert prompts == [([2], True), ([3, POISON], False), ([POISON], False), ([3, POISON], True)]


@pytest.mark.parametrize("cancelled", [False, True], ids=["waits", "cancelled"])
def test_nobody_overtakes_a_prompt_for_which_memory_is_too_small_unless_it_ends(sampler, cancelled):
    """A row ends while another one still has the memory."""
    engine, beside, behind = sampler._engine, {}, []
    refused = RequestHandle()

    def run_out(input_ids: torch.Tensor) -> None:
        if input_ids.shape[1] > 1:
            if (input_ids == POISON).any() and engine._batch.live:
                raise torch.OutOfMemoryError("CUDA out of memory")
            beside.update(dict.fromkeys(input_ids[:, 1].tolist(), len(engine._batch.live)))

    def come(*_: object) -> None:
        """They come while both of the others run. Then the refused one may be cancelled."""
        if len(engine._batch.live) == 2 and not behind:
            for token, handle in ((POISON, refused), (3, RequestHandle())):
                behind.append(pool.submit(sampler.sample, None, ask(1, token), handle))
                await_true(lambda: len(engine._waiting) == len(behind), "it waits")
        elif cancelled and engine._full_at < math.inf:
            refused.abort()

    hold(sampler, lambda: len(engine._unfinished) >= 2 or len(beside) >= 2)
    on_forward(sampler, run_out)
    with ThreadPoolExecutor(4) as pool:
        brief = pool.submit(sampler.sample, None, ask(1, 5, max_tokens=20))
        long = pool.submit(sampler.sample, None, ask(1, 2, max_tokens=60), RequestHandle(come))
        assert [len(future.result(60).sequences[0].tokens) for future in (brief, long)] == [20, 60]
        assert len(behind[1].result(60).sequences[0].tokens) == 6
    assert beside[3] == (2 if cancelled else 0), "the number of rows beside which it started"
    assert (POISON in beside) is not cancelled


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: out of memory\nSearch for it")],
    ids=["allocator", "driver"],
)
def test_a_prompt_for_which_memory_is_too_small_alone_fails(sampler, error):
    def run_out(input_ids: torch.Tensor) -> None:
        if input_ids.shape[1] > 1 and (input_ids == POISON).any():
            raise error

    on_forward(sampler, run_out)
    with pytest.raises(ServerOpError, match="out of memory"):
        sampler.sample(None, ask(1, POISON))
    assert len(sampler.sample(None, ask(1, 2)).sequences[0].tokens) == 6


def test_a_device_that_is_lost_in_a_prompt_stops_the_engine(sampler):
    def lose(_input_ids: torch.Tensor) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    on_forward(sampler, lose)
    with pytest.raises(ServerOpError, match=r"stopped.*illegal memory access"):
        sampler.sample(None, ask(1, 2))
    assert not sampler.healthy()


def test_each_layer_of_a_long_step_shows_that_the_engine_goes_on(sampler, monkeypatch):
    now, stalled = [0.0], []

    def layer_of_a_minute(*_):
        stalled.append(sampler._engine.stalled_s)
        now[0] += 60

    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for layer in sampler._base.model.model.layers:
        layer.register_forward_pre_hook(layer_of_a_minute)
    sampler.sample(None, ask(1, 2))
    assert len(stalled) >= 6 * len(sampler._base.model.model.layers) > 6
    assert not any(stalled)


def test_a_failed_decode_step_fails_all_in_flight_and_health(sampler):
    def fail_in_decode(input_ids: torch.Tensor) -> None:
        if input_ids.shape[1] == 1:
            raise RuntimeError("the device is gone")

    on_forward(sampler, fail_in_decode)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(sampler.sample, None, ask(1, i, num_samples=10)) for i in range(4)]
        for future in futures:
            with pytest.raises(ServerOpError, match=r"stopped.*the device is gone"):
                future.result(60)
    assert not sampler.healthy()
    with pytest.raises(ServerOpError, match="the device is gone"):
        sampler.sample(None, ask(1, 2))


def test_no_more_than_max_batch_sequences_are_decoded_together(sampler):
    hold(sampler, lambda: len(sampler._engine._unfinished) == 5 or sizes)
    sizes = []
    on_forward(sampler, lambda input_ids: sizes.append(len(input_ids)) if input_ids.shape[1] == 1 else None)
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda i: sampler.sample(None, ask(1, 2, num_samples=7, max_tokens=3 + i)), range(5)))
    assert max(sizes) == 8


def test_requests_that_arrive_while_others_run_join_them(sampler):
    """A long request does not delay a short one after it, nor the other way round."""
    begun, rows = [], []
    on_forward(sampler, lambda input_ids: begun.append(True) if input_ids.shape[1] == 1 else None)
    hold(sampler, lambda: sampler._engine._waiting or rows)
    on_forward(sampler, lambda input_ids: rows.append(len(input_ids)) if input_ids.shape[1] == 1 else None)
    with ThreadPoolExecutor(1) as running:
        long = running.submit(sampler.sample, None, ask(1, 2, max_tokens=400))
        await_true(lambda: begun, "the first decode pass of the long one is held")
        assert len(sampler.sample(None, ask(1, 2, max_tokens=2)).sequences[0].tokens) == 2
        assert len(long.result(60).sequences[0].tokens) == 400
    assert rows == [1, 2] + [1] * 397, "the short one came and went in the middle of the long one"


def test_a_long_prompt_is_run_in_bounded_passes(sampler, monkeypatch):
    from workers.backends.sampling.transformers import batch

    prompt = tuple(range(100))
    whole = sampler.sample(None, ask(*prompt, prompt_logprobs=True))
    widths = []
    on_forward(sampler, lambda input_ids: widths.append(input_ids.numel()))
    monkeypatch.setattr(batch, "SCORED_PASS_TOKENS", 16)
    pieces = sampler.sample(None, ask(*prompt, prompt_logprobs=True))
    assert max(widths) == 16
    np.testing.assert_allclose(pieces.prompt_logprobs, whole.prompt_logprobs, atol=1e-5)
    assert pieces.sequences[0].tokens.tolist() == whole.sequences[0].tokens.tolist()


def test_the_part_of_a_prompt_that_is_not_scored_is_run_in_larger_passes(sampler, monkeypatch):
    from workers.backends.sampling.transformers import batch

    prompt = tuple(range(100))
    whole = sampler.sample(None, ask(*prompt, prompt_logprobs=True))
    monkeypatch.setattr(batch, "SCORED_PASS_TOKENS", 8)
    widths = []
    on_forward(sampler, lambda input_ids: widths.append(input_ids.shape[1]))
    end = sampler.sample(None, ask(*prompt, prompt_logprobs=True, prompt_last_n=10, max_tokens=1))
    assert widths == [89, 8, 3]
    np.testing.assert_allclose(end.prompt_logprobs[-10:], whole.prompt_logprobs[-10:], atol=1e-5)


def test_the_rows_of_an_aborted_request_are_dropped_though_nobody_comes_behind_it(sampler):
    handle, steps, batch = RequestHandle(), [], sampler._engine._batch
    step = batch.step

    def abort_behind_the_fifth() -> None:
        step()
        steps.append(len(batch.live))
        if len(steps) == 5:
            handle.abort()

    batch.step = abort_behind_the_fifth
    with pytest.raises(Aborted):
        sampler.sample(None, ask(1, 2, num_samples=8, max_tokens=400), handle)
    await_true(lambda: not batch.occupied, "its rows are dropped")
    assert steps == [8] * 5


def test_a_job_whose_rows_cannot_be_set_up_fails_alone(sampler, monkeypatch):
    from workers.backends.sampling.transformers import jobs

    def refuse(*_args: object) -> None:
        raise RuntimeError("no stream")

    monkeypatch.setattr(jobs, "StopText", refuse)
    with pytest.raises(ServerOpError, match="no stream"):
        sampler.sample(None, ask(1, 2, stop_strings=("x",)))
    assert len(sampler.sample(None, ask(1, 2)).sequences[0].tokens) == 6


def test_closing_fails_what_is_unfinished(sampler):
    started = ThreadPoolExecutor(1)
    running = threading.Event()
    on_forward(sampler, lambda input_ids: running.set())
    hold(sampler, lambda: sampler._engine._failure)
    future = started.submit(sampler.sample, None, ask(1, 2, max_tokens=500, num_samples=64))
    assert running.wait(60)
    sampler.close()
    with pytest.raises(ServerOpError, match="shutting down"):
        future.result(60)
    started.shutdown()


def test_new_weights_that_were_written_in_part_end_the_engine(folder, tmp_path, monkeypatch):
    """The weights are undefined then; the worker is restarted with the base model's."""
    settings = BaseModelSettings(
        name="tiny", path=str(folder), dtype="float32", sampler=SamplerSettings(backend="transformers")
    )
    backend = TransformersSampler(settings, full=True)
    backend.open()
    other = tiny_qwen3(tmp_path / "other", seed=1)

    def torn(model, source):
        yield next(iter(tensors_in(source)))
        raise OSError("the disk is gone")

    monkeypatch.setattr(full_weights, "weights_for", torn)
    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()
        running = pool.submit(backend.sample, None, ask(1, 2, max_tokens=200), RequestHandle(lambda *_: begun.set()))
        assert begun.wait(60)
        with pytest.raises(ServerOpError, match=r"stopped.*the disk is gone"):
            backend.load("other", other)
        assert len(running.result().sequences[0].tokens) == 200, "what ran before is not harmed"
    assert not backend.healthy()
    with pytest.raises(ServerOpError, match="the disk is gone"):
        backend.load("other", other)


class CpuCasts(TorchDispatchMode):
    """Counts the casts of tensors on the CPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (
            func is torch.ops.aten._to_copy.default
            and args[0].is_cpu
            and kwargs.get("dtype") not in (None, args[0].dtype)
        ):
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_an_adapter_is_cast_on_the_device(sampler, tmp_path):
    """On a busy CPU it would take seconds. The meta device stands in for a GPU."""
    model = sampler._base.model
    peft_files.write(lora.new_adapter(model, LoraSpec(rank=4)), tmp_path, "tiny", model)
    adapters = Adapters(replace(sampler._base, device=torch.device("meta"), dtype=torch.bfloat16))
    with CpuCasts() as casts:
        adapters.load("a", tmp_path)
    assert {(one.device.type, one.dtype) for one in adapters.find("a").tensors.values()} == {("meta", torch.bfloat16)}
    assert casts.count == 0


def test_memory_that_is_short_while_an_adapter_is_loaded_is_no_fault_of_the_adapter(sampler, tmp_path, monkeypatch):
    model = sampler._base.model
    peft_files.write(lora.new_adapter(model, LoraSpec(rank=4)), tmp_path, "tiny", model)

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as memory, pytest.raises(Unavailable, match="memory"):
        memory.setattr(Adapter, "to", run_out)
        sampler.load("a", tmp_path)
    sampler.load("a", tmp_path)
    assert len(sampler.sample("a", ask(1, 2)).sequences[0].tokens) == 6


def test_an_adapter_that_was_evicted_frees_its_memory_though_no_other_request_comes(sampler, tmp_path):
    """The next adapter may need it, and no request runs before that is loaded."""
    model = sampler._base.model
    peft_files.write(lora.new_adapter(model, LoraSpec(rank=4)), tmp_path, "tiny", model)
    sampler.load("a", tmp_path)
    adapter = weakref.ref(sampler._weights.find("a"))
    sampler.sample("a", ask(1, 2))
    sampler.evict("a")
    await_true(lambda: gc.collect() is not None and adapter() is None, "its memory is free")


def test_a_caller_that_waits_for_an_idle_engine_learns_when_it_stops(sampler):
    begun = threading.Event()
    hold(sampler, lambda: sampler._engine._failure)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(sampler.sample, None, ask(1, 2, max_tokens=400), RequestHandle(lambda *_: begun.set()))
        assert begun.wait(60)
        waiting = pool.submit(sampler._engine.when_idle, lambda: pytest.fail("it is not idle"))
        await_true(lambda: sampler._engine._for_idle, "it is asked for")
        sampler.close()
        for future in (running, waiting):
            with pytest.raises(ServerOpError, match="shutting down"):
                future.result(60)
