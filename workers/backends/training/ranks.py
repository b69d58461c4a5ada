"""The processes that train one base model together, their messages, and the tensors each of them owns.

Rank 0 is called; it sends every call to the others as bytes over a control group, on which they may wait for ever.
The sums and broadcasts of a pass go over the default group. There a rank that died is an error; one that hangs is
noticed as a standstill (Trainer.healthy), and at last by the group's own deadline.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

COMPUTE_DEADLINE = timedelta(minutes=10)
_CONTROL_DEADLINE = timedelta(days=365)

# fp32 elements on their way at once: 64 MB.
_BUNDLE_ELEMENTS = 2**24


@dataclass(frozen=True, slots=True)
class RankGroup:
    """`control` is a gloo process group, and None when there is one rank; then every method here does nothing."""

    rank: int = 0
    size: int = 1
    control: Any = None

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over the ranks; one collective for all of them."""
        if self.size > 1 and tensors:
            flat = _flatten(tensors)
            dist.all_reduce(flat)
            _unflatten(flat, tensors)

    def sum_on_(self, tensor: Tensor, target: int) -> None:
        """Replace `tensor`, in place, by its sum over the ranks on rank `target`; on the others it is lost."""
        if self.size > 1:
            dist.reduce(tensor, target)

    def broadcast_(self, tensors: Sequence[Tensor], source: int) -> None:
        """Replace each tensor, in place, by rank `source`'s; one collective for all of them."""
        if self.size > 1 and tensors:
            flat = _flatten(tensors)
            dist.broadcast(flat, source)
            _unflatten(flat, tensors)

    def count(self, mine: bool) -> int:
        """On how many ranks `mine` is true: a collective, so no rank returns before every rank has come here."""
        if self.size == 1:
            return int(mine)
        votes = torch.tensor([int(mine)])
        dist.all_reduce(votes, group=self.control)
        return int(votes)

    def send(self, message: bytes) -> None:
        """Give `message` to every other rank's `receive`."""
        if self.size > 1:
            dist.broadcast(torch.tensor([len(message)]), 0, self.control)
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, self.control)

    def receive(self) -> bytes:
        """The next message of rank 0. Raises RuntimeError when rank 0 is gone."""
        size = torch.empty(1, dtype=torch.int64)
        dist.broadcast(size, 0, self.control)
        message = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(message, 0, self.control)
        return message.numpy().tobytes()

    def leave(self) -> None:
        """End the group here; the process has yet to `end`."""
        if self.size > 1:
            dist.destroy_process_group()


def control_group() -> Any:
    """A gloo group over all ranks; a collective, after the default group is there."""
    return dist.new_group(backend="gloo", timeout=_CONTROL_DEADLINE)


def end() -> NoReturn:
    """End a process that was a rank, as one that did what was asked of it.

    Not by the interpreter's own way out: the groups that DeepSpeed made outlive `leave` with three threads each, and a
    process that exits while they live now and then aborts (SIGABRT).
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def default_environment() -> Iterator[None]:
    """What torch.distributed reads, for a process no launcher started: one rank, and a port nobody listens on.

    Only as long as the block runs: a child of this process must not take itself for a rank of our group. LOCAL_RANK
    stays, since DeepSpeed reads it again in every ZeRO-3 pass.
    """
    if "RANK" in os.environ:
        yield
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(alone, LOCAL_RANK="0")
    try:
        yield
    finally:
        for name in alone:
            os.environ.pop(name, None)


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def _unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


@dataclass(frozen=True, slots=True)
class Shards:
    """`owners`: the rank of each name, in the tensors' order; where nothing is split, every rank owns all.

    The methods are collectives, between `device` and `device`. They take tensors by name, of which a rank need hold its
    own alone: the others may be on torch's meta device, to say their shape.
    """

    owners: Mapping[str, int]
    ranks: RankGroup
    device: torch.device
    split: bool

    @classmethod
    def of(cls, sizes: Mapping[str, int], ranks: RankGroup, device: torch.device, *, split: bool) -> Shards:
        """`sizes` in elements. Split: largest first, each to the rank that holds least; the same on every rank."""
        split = split and ranks.size > 1
        if not split:
            return cls(dict.fromkeys(sizes, ranks.rank), ranks, device, split)
        loads, owners = [0] * ranks.size, dict.fromkeys(sizes, 0)
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += sizes[name]
        return cls(owners, ranks, device, split)

    def owns(self, name: str) -> bool:
        return self.owners[name] == self.ranks.rank

    def mine(self) -> list[str]:
        return [name for name in self.owners if self.owns(name)]

    def norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The L2 norm of all together, fp32: the same bits however they are split."""
        if not self.split:
            return get_total_norm([tensors[name] for name in self.owners])
        norms = torch.zeros(len(self.owners), device=self.device)
        for i, name in enumerate(self.owners):
            if self.owns(name):
                norms[i] = get_total_norm([tensors[name]])
        self.ranks.sum_([norms])
        return get_total_norm([norms])

    def share_(self, tensors: Mapping[str, Tensor]) -> None:
        """Each becomes, in place and on every rank, what it is on its owner."""
        if self.split:
            for owner, names in self._bundles(tensors):
                self.ranks.broadcast_([tensors[name] for name in names], owner)

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of all of them on the CPU of rank 0; nothing on the others."""
        found: dict[str, Tensor] = {}
        for owner, names in self._bundles(tensors):
            parts = [self._sent(tensors[name], mine=self.owns(name)) for name in names]
            if self.split:
                self.ranks.broadcast_(parts, owner)
            if self.ranks.rank == 0:
                found |= {name: _copied(part) for name, part in zip(names, parts, strict=True)}
        return found

    def _sent(self, tensor: Tensor, *, mine: bool) -> Tensor:
        if mine:
            return tensor.detach().to(self.device) if self.split else tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)

    def _bundles(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Sequence[str]]]:
        """(owner, names of tensors that are small enough to travel together), the same on every rank."""
        for owner in sorted(set(self.owners.values())):
            bundle: list[str] = []
            room = _BUNDLE_ELEMENTS
            for name in (name for name in self.owners if self.owners[name] == owner):
                if bundle and tensors[name].numel() > room:
                    yield owner, bundle
                    bundle, room = [], _BUNDLE_ELEMENTS
                bundle.append(name)
                room -= tensors[name].numel()
            yield owner, bundle


def _copied(tensor: Tensor) -> Tensor:
    return tensor.to(torch.device("cpu"), copy=True, memory_format=torch.contiguous_format)
