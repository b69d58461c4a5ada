"""Programs of test_training_memory.py, which really run out of memory and go on.

`python -m tests.conformance.training_memory BASE TRAINER` does so in one process, and `one_of_two` in one rank of two.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from app.domain.ops import AdamParams, ForwardBackward, LoraSpec, OptimStep
from app.domain.results import Done, OptimStepOutput
from app.errors import UserOpError
from app.settings import BaseModelSettings
from tests.conformance.trainers import TRAINERS
from tests.parity.datums import batch, supervised
from workers.backends.training import backends, ranks
from workers.backends.training.base import Create, Load
from workers.backends.training.batch_ops import Job
from workers.backends.training.passes import Pass
from workers.backends.training.states.adapter import AdapterModels, AdapterState
from workers.backends.training.trainer import Trainer

BUDGET = 20_000
GOOD = ForwardBackward(batch(supervised(1, (9, 30, 4))), "cross_entropy")
# Its activations in a pass need more than 100 MB.
LARGE = ForwardBackward(batch(supervised(2, [500] * 40)), "cross_entropy")
# Two micro-batches of that size, one for each rank.
FOR_TWO = ForwardBackward(batch(supervised(2, [500] * 80)), "cross_entropy")
# The last datum's targets fail here, when the head has gradients of the first datum.
WIDE = ForwardBackward(batch([*supervised(3, [500]), *supervised(3, [20], width=200_000)]), "cross_entropy")
# LoRA ranks and folders of models for which memory runs out until all others have left the device, or always.
AT_FIRST, FOR_GOOD = (5, "at first"), (6, "for good")
_ROOM = 48 * 2**20


@contextmanager
def little_memory() -> Iterator[None]:
    """Limits memory as on a machine with room for a small pass and no more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def gradients(backend: Trainer, model: str) -> Mapping[str, bytes]:
    return {name: gradient.tobytes() for name, gradient in backend.gradients(model).items()}


def check_failed(result: Any) -> None:
    assert isinstance(result, UserOpError), result
    assert f"micro_batch_tokens is {BUDGET}" in str(result), result


def main(base: str, trainer: str) -> None:
    torch.set_num_threads(1)
    settings = {**TRAINERS[trainer], "micro_batch_tokens": BUDGET}
    backend = backends.create(BaseModelSettings(name="tiny", path=base, dtype="float32", trainer=settings))
    backend.open()
    spec = LoraSpec(rank=4, seed=1)
    backend.apply({model: Create(spec) for model in ("large", "neighbour", "alone")})
    for model in ("large", "neighbour", "alone"):
        backend.apply({model: GOOD})
    before = gradients(backend, "large")
    with little_memory():
        for op in (LARGE, WIDE):
            check_failed(backend.apply({"large": op})["large"])
        together = backend.apply({"large": LARGE, "neighbour": GOOD})
        check_failed(together["large"])
        assert backend.healthy()
        alone = backend.apply({"alone": GOOD})["alone"]
    assert gradients(backend, "large") == before
    assert gradients(backend, "neighbour") == gradients(backend, "alone") != before
    assert together["neighbour"].logprobs.values.tobytes() == alone.logprobs.values.tobytes()
    backend.apply({"large": GOOD})
    assert gradients(backend, "large") == gradients(backend, "alone")
    print("as if never sent")


def one_of_two(settings: str, full: str) -> None:
    """Runs in both ranks of a group. Memory runs out on the second rank only."""
    torch.set_num_threads(1)
    backend = backends.create(BaseModelSettings.model_validate_json(settings), full=bool(full))
    backend.open()
    if os.environ["RANK"] != "0":
        limit_large_passes()
        backend.follow()
        ranks.end()
    spec = None if full else LoraSpec(rank=4, seed=1)
    for model in ("large", "alone"):
        backend.apply({model: Create(spec)})
        backend.apply({model: GOOD})
    before = gradients(backend, "large")
    for _ in range(2):
        check_failed(backend.apply({"large": FOR_TWO})["large"])
        assert backend.healthy()
        assert gradients(backend, "large") == before
    for model in ("large", "alone"):
        backend.apply({model: GOOD})
    assert gradients(backend, "large") == gradients(backend, "alone") != before
    backend.shutdown()
    ranks.end()


def calls_of_two(settings: str, folder: str) -> None:
    """Runs in both ranks of a group. In calls other than passes, memory runs out on the second rank."""
    torch.set_num_threads(1)
    backend = backends.create(BaseModelSettings.model_validate_json(settings))
    backend.open()
    if os.environ["RANK"] != "0":
        run_out(AdapterModels, "fresh", lambda _, op: op.lora.rank)
        run_out(AdapterModels, "read", lambda _, source: source.name)
        run_out(AdapterState, "begin_step", lambda state, _: state.adapter.spec.rank)
        torch.cuda.empty_cache = partial(free_slowly, Path(folder) / "freed")
        backend.follow()
        ranks.end()
    backend.apply({"a": Create(LoraSpec(rank=4)), "b": Create(LoraSpec(rank=4))})
    backend.apply({"a": GOOD, "b": GOOD})
    before = gradients(backend, "a")
    sources = [(rank, Path(folder, name)) for rank, name in (AT_FIRST, FOR_GOOD)]
    for _, source in sources:
        source.mkdir()
        backend.capture("a", optimizer=True)(source)
    small, large = (
        (Create(LoraSpec(rank=r)), Create(LoraSpec(rank=4), f), Load(f, optimizer=True)) for r, f in sources
    )
    assert all(result == Done() for result in backend.apply(dict(zip(("c", "d", "b"), small, strict=True))).values())
    refused = backend.apply(dict(zip(("e", "f", "a"), large, strict=True)))
    assert all("memory ran out" in str(result) for result in refused.values())
    assert gradients(backend, "a") == before
    step = OptimStep(AdamParams(learning_rate=1e-3))
    assert isinstance(backend.apply({"c": step})["c"], OptimStepOutput)
    assert isinstance(backend.apply({"c": step, "a": step})["a"], OptimStepOutput)
    backend.free_memory()
    assert Path(folder, "freed").exists(), "a sampler would take memory that the second rank still holds"
    assert backend.healthy()
    backend.shutdown()
    ranks.end()


def free_slowly(done: Path) -> None:
    time.sleep(1)
    done.touch()


def run_out(owner: type, method: str, about: Callable[..., Any]) -> None:
    """Lets memory run out in a method: `about` its arguments tells for which model."""
    run, calls = getattr(owner, method), Counter[Any]()

    def short(*given: Any, **options: Any) -> Any:
        calls[model := about(*given)] += 1
        if model in FOR_GOOD or (model in AT_FIRST and calls[model] % 2 == 1):
            raise torch.OutOfMemoryError
        return run(*given, **options)

    setattr(owner, method, short)


def gathered(settings: str, file: str) -> None:
    """Runs in both ranks of a group at ZeRO-3. No gathered weight is held between the forward and backward pass, and
    rank 0 writes the gradient to `file`."""
    backend = backends.create(BaseModelSettings.model_validate_json(settings))
    backend.open()
    freed = _freed_storages()
    gradient = Pass._hidden_gradient

    def between(*arguments: Any) -> Any:
        assert len(freed) > 10
        # gloo's thread lets go of a gathered weight some 4 ms after the gather has returned.
        deadline = time.monotonic() + 60
        while held := [shape for shape, storage in freed if not storage.expired()]:
            assert time.monotonic() < deadline, held
            time.sleep(0.01)
        return gradient(*arguments)

    Pass._hidden_gradient = between  # type: ignore[method-assign]
    if os.environ["RANK"] != "0":
        backend.follow()
        ranks.end()
    backend.apply({"m": Create(LoraSpec(rank=4, seed=1))})
    failure = backend.apply({"m": GOOD})["m"]
    assert not isinstance(failure, Exception), failure
    np.savez(file, **backend.gradients("m"))
    backend.shutdown()
    ranks.end()


def _freed_storages() -> list[tuple[Any, StorageWeakRef]]:
    """The storages of gathered weights that DeepSpeed lets go of from now on, with the weights' shapes."""
    from deepspeed.runtime.zero import partition_parameters

    freed, free = [], partition_parameters.free_param

    def noted(weight: Any) -> None:
        freed.append((weight.ds_shape, StorageWeakRef(weight.data.untyped_storage())))
        free(weight)

    partition_parameters.free_param = noted
    return freed


def limit_large_passes() -> None:
    """Leaves little memory to the large passes of this process."""
    run = Trainer._run

    def limited(trainer: Trainer, ops: Mapping[str, ForwardBackward]) -> dict[str, Job] | None:
        is_large = any(len(op.batch.tokens.values) > BUDGET for op in ops.values())
        with little_memory() if is_large else nullcontext():
            return run(trainer, ops)

    Trainer._run = limited


if __name__ == "__main__":
    main(*sys.argv[1:])
