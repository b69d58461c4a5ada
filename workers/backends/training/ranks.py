"""The processes that train one base model together, their messages, and the tensors that each process owns.

Callers use rank 0. It sends every call to the others as bytes over a control group, on which they may wait for ever.
The sums and broadcasts of a pass go over the default group. There gloo reports a dead rank, but NCCL does not: rank 0
looks for the other ranks' processes (`RankGroup.lost_one`). A rank that hangs is noticed by the stall detector
(Trainer.healthy), or else by the group's own timeout.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, NoReturn, TypeVar

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor

from app.errors import OpError, SetupError
from workers.backends.devices import copied
from workers.backends.failures import ran_out_of_memory

T = TypeVar("T")
Name = TypeVar("Name", str, int)
COMPUTE_DEADLINE = timedelta(minutes=10)
_CONTROL_DEADLINE = timedelta(days=365)

_LOOK_S = 1.0
# Enough to leave in order, where rank 0 has left in order just before.
_LAST_S = 10.0

# fp32 elements sent at once: 64 MB.
_BUNDLE_ELEMENTS = 2**24


class _Outcome(IntEnum):
    """How a part of a call ended on a rank, from good to bad."""

    DONE = 0
    REFUSED = 1
    SHORT = 2
    """Memory ran out."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of one trainer. `control` is a gloo process group.

    With one rank it is None: `agreed`, `count` and `greatest` then return this rank's own, `receive` may not be called,
    and the other methods do nothing. `store`: rank 0 keeps the store alive in it. `siblings`: the other ranks on this
    machine.
    """

    rank: int = 0
    size: int = 1
    control: Any = None
    store: Any = None
    siblings: tuple[psutil.Process, ...] = ()

    def lost_one(self) -> bool:
        """True if another rank on this machine has ended. No collective; any thread may call it."""
        return not all(map(_lives, self.siblings))

    def end_after_loss(self) -> NoReturn:
        """Ends this process 10 s after another rank on this machine has ended. For a thread: the rank itself may wait
        for ever for the other one, and ignores the launcher's signals."""
        while not self.lost_one():
            time.sleep(_LOOK_S)
        time.sleep(_LAST_S)
        os._exit(1)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor, in place, by its sum over the ranks; one collective for all of them. They have one
        dtype and device."""
        if self.size == 1 or not tensors:
            return
        if len(tensors) == 1 and tensors[0].is_contiguous():  # a gradient may have gigabytes
            dist.all_reduce(tensors[0].detach())
            return
        flat = _flatten(tensors)
        dist.all_reduce(flat)
        _unflatten(flat, tensors)

    def sum_on_(self, tensor: Tensor, target: int) -> None:
        """Replaces `tensor`, in place, by its sum over the ranks on rank `target`; the others lose its content."""
        if self.size > 1:
            dist.reduce(tensor, target)

    def broadcast_(self, tensors: Sequence[Tensor], source: int) -> None:
        """Replaces each tensor, in place, by the tensor of rank `source`; one collective for all of them. They
        have one dtype and device."""
        if self.size > 1 and tensors:
            flat = _flatten(tensors)
            dist.broadcast(flat, source)
            _unflatten(flat, tensors)

    def count(self, mine: bool) -> int:
        """Counts the ranks where `mine` is true. A collective: no rank returns before every rank has called it."""
        if self.size == 1:
            return int(mine)
        votes = torch.tensor([int(mine)])
        dist.all_reduce(votes, group=self.control)
        return int(votes)

    def greatest(self, mine: int) -> int:
        """Returns the greatest `mine` of all ranks. A collective."""
        if self.size == 1:
            return mine
        found = torch.tensor([mine])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control)
        return int(found)

    def agreed(self, run: Callable[[], T]) -> T | None:
        """Runs a part of a call in which no rank waits for another. A collective.

        Returns None on every rank if memory ran out on one. Raises an OpError that every rank raised. No rank returns
        before every rank has run its part, because the owner may then remove the files that it read.
        """
        outcome, found = _Outcome.DONE, None
        try:
            found = run()
        except OpError:
            if self._worst(_Outcome.REFUSED) == _Outcome.SHORT:
                return None
            raise
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            outcome = _Outcome.SHORT  # the error itself would keep the tensors of its frames
        return found if self._worst(outcome) == _Outcome.DONE else None

    def _worst(self, mine: _Outcome) -> int:
        """Returns the worst outcome of all ranks. Raises RuntimeError where some of them refused and others did not."""
        worst = self.greatest(mine)
        if worst == _Outcome.REFUSED and (refused := self.count(mine == worst)) < self.size:
            raise RuntimeError(f"{refused} of {self.size} ranks refused a call, so the ranks are out of step")
        return worst

    def send(self, message: bytes) -> None:
        """Sends `message` to the `receive` of every other rank."""
        if self.size > 1:
            dist.broadcast(torch.tensor([len(message)]), 0, self.control)
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, self.control)

    def receive(self) -> bytes:
        """Returns the next message of rank 0. Raises RuntimeError when rank 0 is gone."""
        size = torch.empty(1, dtype=torch.int64)
        dist.broadcast(size, 0, self.control)
        message = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(message, 0, self.control)
        return message.numpy().tobytes()

    def leave(self) -> None:
        """Ends the group here; the process must still `end`."""
        if self.size > 1:
            dist.destroy_process_group()


def joined(store: Any) -> RankGroup:
    """Returns the group of all ranks. A collective; the default group must exist."""
    control = dist.new_group(backend="gloo", timeout=_CONTROL_DEADLINE)
    here = torch.tensor([int(os.environ.get("CROSS_RANK", "0")), os.getpid()])
    places = [torch.empty_like(here) for _ in range(dist.get_world_size())]
    dist.all_gather(places, here, group=control)
    on_this_machine = [int(pid) for host, pid in places if host == here[0]]
    siblings = tuple(psutil.Process(pid) for pid in on_this_machine if pid != os.getpid())
    return RankGroup(dist.get_rank(), dist.get_world_size(), control, store, siblings)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError):  # such as too many open files: that says nothing of the other process
        return True


def end() -> NoReturn:
    """Ends a process that was a rank, with the exit status of success.

    It skips the interpreter's normal exit: the groups that DeepSpeed made outlive `leave` with three threads each, and
    a process that exits while they live sometimes aborts (SIGABRT).
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def default_environment() -> Iterator[None]:
    """Sets the variables that DeepSpeed reads, for a process without a launcher: one rank.

    They last only for the block: a child of this process must not take itself for a rank of this group. LOCAL_RANK
    stays, since DeepSpeed reads it again in every ZeRO-3 pass.
    """
    if "RANK" in os.environ:
        yield
        return
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(alone, LOCAL_RANK="0")
    try:
        yield
    finally:
        for name in alone:
            os.environ.pop(name, None)


def stay_on_this_machine() -> None:
    """Makes gloo and NCCL listen on loopback, in this process and its children, unless an interface was chosen.

    They take any connection. By default they would listen on the interface of the machine's own name.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def join_alone(backend: str, deadline: timedelta) -> None:
    """Makes the default group of one rank, unless this process has it. Its store is in memory, so no port is open for
    it."""
    stay_on_this_machine()
    if dist.is_initialized():  # by another backend of this process
        return
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=deadline)  # type: ignore[attr-defined]


def serve_store(address: str, port: int = 0) -> Any:
    """Starts torch's TCPStore for a group of ranks, listening on `address` only (`port` 0: any free one).

    It lives as long as the returned object. torch itself would listen on every interface, and the store obeys
    everybody who connects. Raises SetupError when this machine does not have the address.
    """
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(place[:2], family=family)
    except OSError as error:
        raise SetupError(
            f"rank 0 cannot listen on {address} port {port} ({error.strerror}): the first name of the hostfile must "
            "be an address of the first host, or GLOO_SOCKET_IFNAME name its interface"
        ) from None
    host, port, *_ = listening.getsockname()
    make = dist.TCPStore  # type: ignore[attr-defined]
    return make(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def serve_hosts() -> Any:
    """Starts the store of a group over several hosts, on its rank 0; the other ranks get None.

    It listens on the interface that GLOO_SOCKET_IFNAME names, else on the address of MASTER_ADDR. The ranks of the
    first host then reach it at that address, and all others at MASTER_ADDR. torchrun serves the store of a group on
    one machine itself.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface and os.environ.get("CROSS_RANK") == "0":  # DeepSpeed's launcher numbers the hosts so
        os.environ["MASTER_ADDR"] = _address_of(interface)
    if os.environ["RANK"] != "0":
        return None
    store = serve_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    # Without it, torch would start a second server.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return store


def _address_of(interface: str) -> str:
    found = psutil.net_if_addrs().get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for each in found:
            if each.family == family:
                return str(each.address)
    raise SetupError(
        f"GLOO_SOCKET_IFNAME is {interface!r}, but this machine has no such interface with an address; correct it"
    )


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def _unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def assigned(sizes: Mapping[Name, int], ranks: int) -> dict[Name, int]:
    """Returns the rank of each tensor, in the given order: largest first, each goes to the rank that holds least."""
    loads, owners = [0] * ranks, dict.fromkeys(sizes, 0)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


@dataclass(frozen=True, slots=True)
class Shards:
    """Ownership of tensors by ranks. `owners`: the rank of each name, in the tensors' order.

    Where nothing is split, every rank owns all tensors. `share_` and `gathered` are collectives, which send and receive
    on `device`. They take tensors by name. A rank needs to hold only its own tensors: the others may be on torch's meta
    device, to give their shape.
    """

    owners: Mapping[str, int]
    ranks: RankGroup
    device: torch.device
    split: bool

    @classmethod
    def of(cls, sizes: Mapping[str, int], ranks: RankGroup, device: torch.device, *, split: bool) -> Shards:
        """Assigns tensors to ranks; `sizes` in elements. The result is the same on every rank."""
        split = split and ranks.size > 1
        if not split:
            return cls(dict.fromkeys(sizes, ranks.rank), ranks, device, split)
        return cls(assigned(sizes, ranks.size), ranks, device, split)

    def owns(self, name: str) -> bool:
        return self.owners[name] == self.ranks.rank

    def mine(self) -> list[str]:
        return [name for name in self.owners if self.owns(name)]

    def share_(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces each tensor, in place and on every rank, by its owner's."""
        if self.split:
            for owner, names in self._bundles(tensors):
                self.ranks.broadcast_([tensors[name] for name in names], owner)

    def gathered(
        self, tensors: Mapping[str, Tensor], *, pinned: bool = False, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Copies all tensors to the CPU of rank 0, in `dtype` or else in their own; returns nothing on the others. See
        `copied`."""
        if not self.split:
            mine = {name: tensors[name] for name in self.mine()}
            return copied(mine, pinned=pinned, dtype=dtype) if self.ranks.rank == 0 else {}
        found: dict[str, Tensor] = {}
        for owner, names in self._bundles(tensors):
            parts = {name: self._sent(tensors[name], dtype, mine=self.owns(name)) for name in names}
            self.ranks.broadcast_([*parts.values()], owner)
            if self.ranks.rank == 0:
                found |= copied(parts, pinned=pinned)
        return found

    def _sent(self, tensor: Tensor, dtype: torch.dtype | None, *, mine: bool) -> Tensor:
        dtype = dtype or tensor.dtype
        if mine:
            return tensor.detach().to(self.device, dtype)
        return torch.empty(tensor.shape, dtype=dtype, device=self.device)

    def _bundles(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Sequence[str]]]:
        """Yields (owner, names of tensors small enough to travel together), the same on every rank."""
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


def _norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the L2 norm of each tensor. On a CPU the norms of its rows come first: a single sum of the squares of 5
    million elements in fp32 makes the norm wrong by 1e-4."""
    rows = [torch.linalg.vector_norm(one, dim=-1) if one.is_cpu and one.dim() > 1 else one for one in tensors]
    return torch._foreach_norm(rows)


@torch.no_grad()
def total_norms(parts: Sequence[tuple[Shards, Mapping[str, Tensor]]]) -> list[Tensor]:
    """Returns the L2 norm of all tensors of each part together, fp32 on the CPU.

    It has the same bits however the part is split, and whatever the other parts are. The parts are of one trainer: a
    single collective and a single wait of the host serve all of them.
    """
    if not parts:
        return []
    shards, _ = parts[0]
    mine = [tensors[name] for part, tensors in parts for name in part.mine()]
    norms = iter(_norms(mine) if mine else ())
    none = torch.zeros((), device=mine[0].device if mine else shards.device)
    each = torch.stack([next(norms) if part.owns(name) else none for part, _ in parts for name in part.owners])
    if shards.split:
        each = each.to(shards.device)
        shards.ranks.sum_([each])
    return [torch.linalg.vector_norm(own) for own in torch.split(each.cpu(), [len(part.owners) for part, _ in parts])]
