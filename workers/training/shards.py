"""Which rank owns which of a model's tensors, and what the ranks tell each other of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from workers.training.ranks import RankGroup

# fp32 elements on their way at once: 64 MB.
_BUNDLE_ELEMENTS = 2**24


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
