"""A production worker process, `python -m ... trainer|sampler FOLDER`, whose engine works until FOLDER/go exists.

The engine is a stand-in, so that a start takes a second. A pass of the trainer is one call that Python cannot
interrupt, as one of a GPU library is.

With a third argument `long`, the worker has ten minutes for its orderly stop. `interrupted` also sends it a SIGTERM at
every line of the start of its heartbeat and of the signal's handler. With `patient`, it waits for an hour for each
answer of its broker. `ranks` makes it one of a trainer's ranks under torchrun. Its pass is no collective, so it learns
of a dead rank as little as a pass over NCCL.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from app import dispatch
from app.domain.ops import ForwardBackward
from app.domain.results import Output
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import OpError
from app.settings import BaseModelSettings
from tests.assembly import INFO
from tests.property.vector_backend import VectorBackend
from workers import cli
from workers.backends.sampling.base import RequestHandle
from workers.backends.training.ranks import RankGroup, joined
from workers.process import assembly, orderly_stop, parts
from workers.process.liveness import Heartbeat
from workers.process.parts import Parts, Serving
from workers.process.runtime import Runtime
from workers.sample.assembly import assemble_sampler
from workers.train.assembly import assemble_trainer

FOLDER = Path(sys.argv[2]) if __name__ == "__main__" else Path()


def begin() -> bool:
    """Notes that work has begun. Returns True if it may end."""
    (FOLDER / "begun").touch()
    return (FOLDER / "go").exists()


class SlowTrainer(VectorBackend):
    ranks = RankGroup()

    def healthy(self) -> bool:
        return not self.ranks.lost_one()

    def apply(self, ops: Mapping[str, Any]) -> Mapping[str, Output | OpError]:
        if any(isinstance(op, ForwardBackward) for op in ops.values()) and not begin():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # half an hour
        return super().apply(ops)


class SlowSampler:
    batch, adapter_capacity = 64, 8

    def sample(
        self, adapter_id: str | None, request: SampleRequest, handle: RequestHandle | None = None
    ) -> SampleOutput:
        while not begin():
            time.sleep(0.05)
        return SampleOutput(())

    def healthy(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def describe(self) -> dict[str, object]:
        return {}


def start_trainer(its: Parts, base: BaseModelSettings, queue: str, *, full: bool) -> Runtime:
    return assemble_trainer(its, Serving(base, SlowTrainer(), INFO, queue)).runtime()


def start_sampler(its: Parts, base: BaseModelSettings, queue: str, *, full: bool) -> Runtime:
    return assemble_sampler(its, Serving(base, SlowSampler(), INFO, queue)).runtime  # type: ignore[arg-type]


def at_each_line(_: FrameType, event: str, __: object) -> Any:
    if event == "line":
        signal.raise_signal(signal.SIGTERM)
    return at_each_line


class Interrupted(Heartbeat):
    def start(self) -> None:
        sys.settrace(at_each_line)
        signal.raise_signal(signal.SIGTERM)
        super().start()
        sys.settrace(None)
        (FOLDER / "begun").touch()


def join() -> None:
    """Joins the group as production does. Returns on rank 0 alone; the others wait for it until it is gone."""
    if os.environ["RANK"] != "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    SlowTrainer.ranks = joined(None)
    if os.environ["RANK"] != "0":
        SlowTrainer.ranks.receive()


if __name__ == "__main__":
    option = sys.argv[3] if len(sys.argv) > 3 else ""
    orderly_stop._WITHIN_S = 600.0 if option in ("long", "interrupted") else 0.2
    if option == "interrupted":
        parts.Heartbeat = Interrupted  # type: ignore[misc]
    if option == "patient":
        dispatch.ANSWER_S = 3600.0
    if option == "ranks":
        join()
    assembly._start_trainer, assembly._start_sampler = start_trainer, start_sampler
    if sys.argv[1] == "trainer":
        cli.run_worker(f"train.{INFO.name}", "worker", ["-P", "solo"])
    else:
        cli.run_worker(f"sample.{INFO.name}", "worker", ["-P", "threads", "-c", "4"])
