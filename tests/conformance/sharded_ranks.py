"""Programs of test_sharded_loading.py: a rank that loads a base model at ZeRO stage 3."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from app import malloc
from app.domain.results import Done
from app.settings import BaseModelSettings
from workers.backends.training import backends, ranks
from workers.backends.training.base import Create
from workers.models import base_model

_EVERY_S = 0.005


def compare(settings: str, folder: str) -> None:
    """Writes the names of what differs from the ordinary load of the base, which is empty if all is well."""
    given = [BaseModelSettings.model_validate(one) for one in json.loads(settings)]
    found = {f"{one.name} {one.dtype}": list(differences(one)) for one in given}
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    ranks.end()


def differences(settings: BaseModelSettings) -> Iterator[str]:
    backend = backends.create(settings, full=True)
    backend.open()
    engine = backend._engine
    wanted = base_model.load(settings)
    found: dict[str, Tensor] = {}
    for name, parameter in engine.trained.items():
        with engine.gathered(parameter):
            found[name] = parameter.detach().clone()
    yield from unequal(found, {name: one.to(wanted.dtype) for name, one in wanted.model.named_parameters()})
    yield from unequal(dict(engine.base.model.named_buffers()), dict(wanted.model.named_buffers()))
    for read in (ties, lambda model: model.all_tied_weights_keys, lambda model: model.config.to_dict()):
        if read(engine.base.model) != read(wanted.model):
            yield f"ties or configuration: {read(engine.base.model)} is not {read(wanted.model)}"
    if engine.base.info != wanted.info:
        yield "the description"


def unequal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    names = found.keys() | wanted.keys()
    return sorted(
        name for name in names if name not in found or name not in wanted or bits(found[name]) != bits(wanted[name])
    )


def bits(tensor: Tensor) -> tuple[Any, ...]:
    plain = tensor.detach().contiguous()
    return plain.dtype, plain.shape, plain.flatten().view(torch.uint8).numpy().tobytes()


def ties(model: Any) -> set[frozenset[str]]:
    """The sets of names of one parameter."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(one) for one in names.values()}


def measure(settings: str, folder: str) -> None:
    """Writes the most memory that loading takes above that of the process before, in bytes."""
    malloc.give_large_blocks_back()  # what malloc keeps of freed blocks would count
    backend = backends.create(BaseModelSettings.model_validate_json(settings))
    with most_memory() as most:
        backend.open()
    (Path(folder) / os.environ["RANK"]).write_text(str(most[0]))
    ranks.end()


def measure_full(settings: str, folder: str) -> None:
    """Writes the same of a full fine-tune that is made."""
    malloc.give_large_blocks_back()
    backend = backends.create(BaseModelSettings.model_validate_json(settings), full=True)
    backend.open()
    with most_memory() as most:
        if os.environ["RANK"] == "0":
            assert backend.apply({"a": Create(None)}) == {"a": Done()}
            backend.shutdown()
        else:
            backend.follow()
    (Path(folder) / os.environ["RANK"]).write_text(str(most[0]))
    ranks.end()


@contextmanager
def most_memory() -> Iterator[list[int]]:
    """Yields a list of one number, which the block's end makes the most memory that was taken within the block."""
    ended, most, before = threading.Event(), [0], memory()

    def watch() -> None:
        while not ended.wait(_EVERY_S):
            most[0] = max(most[0], memory() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def memory() -> int:
    """Bytes in memory without unchanged pages of files, which the system takes back when it needs memory."""
    found = psutil.Process().memory_info()
    return int(found.rss - found.shared)
