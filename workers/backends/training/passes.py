"""One pass: the datums of several ForwardBackward Ops run through the base together, each Op under its own adapter, and
from hidden states to outputs and back.

A datum's tokens never see another's, so a bad Op cannot affect its neighbours: its loss is cut from the backward pass
and its gradient is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from workers.backends.devices import moved
from workers.backends.failures import ran_out_of_memory
from workers.backends.training.batch_ops import Column, Job, MicroBatch, Share, asks_entropy, cut
from workers.backends.training.engine import Engine
from workers.backends.training.lm_head import LmHead, chunk_sizes
from workers.backends.training.outputs import PolicyOutputs, ValueOutputs
from workers.models import lora
from workers.models.adapter import Segments
from workers.models.images import Picture
from workers.models.routers import NO_ROUTE, Routing

Outputs = Callable[[MicroBatch, Tensor], PolicyOutputs | ValueOutputs]
"""Computes the outputs of a block from its hidden states [T, hidden size]."""


class OutOfMemory(MemoryError):
    """Memory ran out in a pass. Every rank raises it, so the ranks are still in step."""


class Pass:
    """Runs jobs on this rank's share of the micro-batches.

    All jobs are forward-only or none is; all are critics or none is.
    """

    def __init__(self, engine: Engine, jobs: Sequence[Job], micro_batch_tokens: int) -> None:
        self._engine = engine
        self._jobs = jobs
        self._device = engine.base.device
        self._sequence = engine.sequence
        self._backward = not jobs[0].op.forward_only
        self._critics = jobs[0].critic
        lengths = [job.tokens.lengths for job in jobs]
        self._batches = cut(lengths, micro_batch_tokens, packed=engine.hidden_states.packed)
        self._has_images = any(job.op.batch.images for job in jobs)
        layers, experts = engine.hidden_states.routed
        self._load = torch.zeros(len(jobs), layers, experts, device=self._device) if experts else None

    def run(self, progress: Callable[[], None]) -> None:
        """Fills every job's scores and datums, and unless forward-only the found gradient of its state, from all ranks.

        `progress` is called after each micro-batch. Raises OutOfMemory.
        """
        ranks, sharing = self._engine.ranks, self._sequence.size
        groups = ranks.size // sharing
        rounds = -(-len(self._batches) // groups)
        for i in range(rounds):
            mine = i * groups + ranks.rank // sharing
            if self._engine.collective_passes:
                self._run_in_step(mine)
            else:
                self._run_alone(mine)
            progress()
        self._engine.rest()
        self._gather()

    def _run_in_step(self, mine: int) -> None:
        """Runs this rank's micro-batch of a round, or a stand-in. Memory that runs out here leaves the other ranks in a
        collective, so it is an error like any other."""
        if mine < len(self._batches):
            self._run(self._batches[mine])
        else:
            self._keep_in_step()
        self._collect()

    def _run_alone(self, mine: int) -> None:
        """Runs this rank's micro-batch of a round, if there is one. Raises OutOfMemory on every rank when memory ran
        out on one."""
        failed = False
        try:
            if mine < len(self._batches):
                self._run(self._batches[mine])
            self._collect()
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            failed = True  # the error itself would keep the tensors of its frames, up to a garbage collection
        if failed:
            for job in self._jobs:
                job.state.drop_found()
            self._collect()  # the other ranks wait for this one in the sums of their gradients
        if self._engine.ranks.count(failed):
            raise OutOfMemory

    def _run(self, batch: MicroBatch) -> None:
        tokens = np.concatenate([self._jobs[share.job].tokens.flat(share.datums) for share in batch.shares])
        owners = [(self._jobs[share.job].adapter, len(share.datums)) for share in batch.shares]
        picture = self._picture(batch)
        with torch.set_grad_enabled(self._backward):
            hidden = self._engine.hidden_states(
                self._moved(tokens.astype(np.int64)),
                batch.lengths,
                owners,
                hidden=self._critics,
                picture=picture,
                routing=None if self._load is None else self._routing(batch, self._load),
            )
        gradient = self._hidden_gradient(batch, hidden)
        if hidden.requires_grad:
            hidden.backward(gradient)

    def _hidden_gradient(self, batch: MicroBatch, hidden: Tensor) -> Tensor | None:
        """Records results; returns the gradient in `hidden`, unless forward-only. The logits are gone then."""
        gradient = torch.zeros_like(hidden, requires_grad=False) if self._backward else None
        with torch.no_grad(), self._outputs() as outputs_of:
            # Ranks that share the tokens run the head at the same time, so all of their rows are one block.
            limit = chunk_sizes(self._device).rows if self._sequence.size == 1 else sum(batch.lengths)
            for rows, block in batch.blocks(limit):
                outputs = outputs_of(block, hidden[rows])
                scores, entropy = self._assembled(block, outputs)
                seed = self._losses(block, scores, entropy)
                if gradient is not None:
                    gradient[rows] = outputs.gradient(seed[self._own(block)])
        return gradient

    def _picture(self, batch: MicroBatch) -> Picture | None:
        """Returns the images of a micro-batch. A blank one where other ranks' micro-batches may have images: the vision
        tower is a collective too."""
        reader = self._engine.base.images
        if reader is None or not self._has_images:
            return None
        datums = [
            (length, self._jobs[share.job].images(datum))
            for share in batch.shares
            for datum, length in zip(share.datums, share.lengths, strict=True)
        ]
        return reader.picture(datums) or (reader.blank(batch.lengths) if self._engine.collective_passes else None)

    def _routing(self, batch: MicroBatch, load: Tensor) -> Routing:
        ops = np.concatenate([np.full(share.tokens, share.job) for share in batch.shares])
        return Routing(self._routes(batch), self._moved(ops), load)

    def _routes(self, batch: MicroBatch) -> Tensor | None:
        """Returns the given experts, int64 [T, layers, top_k]; None if no token has any."""
        found = [self._jobs[share.job].routes_of(share) for share in batch.shares]
        given = next((part for part in found if part is not None), None)
        if given is None:
            return None
        parts = [
            np.full((share.tokens, *given.shape[1:]), NO_ROUTE) if part is None else part
            for share, part in zip(batch.shares, found, strict=True)
        ]
        return self._moved(np.concatenate(parts))

    @contextmanager
    def _outputs(self) -> Iterator[Outputs]:
        """Yields the function that computes policy or value outputs.

        For policies this is a collective (see Engine.head); a critic makes no logits.
        """
        if self._critics:
            yield self._value_outputs
            return
        with self._engine.head() as head:
            yield partial(self._policy_outputs, head)

    def _policy_outputs(self, head: LmHead, block: MicroBatch, hidden: Tensor) -> PolicyOutputs:
        asked = any(asks_entropy(self._jobs[share.job].op) for share in block.shares)
        targets = self._targets(block)[self._own(block)]
        return PolicyOutputs(head, hidden, targets, self._segments(block), keep=self._backward, entropy=asked)

    def _value_outputs(self, block: MicroBatch, hidden: Tensor) -> ValueOutputs:
        return ValueOutputs(hidden, self._segments(block))

    def _segments(self, block: MicroBatch) -> Segments:
        """Returns the segments of this rank's rows."""
        segments = [(self._jobs[share.job].adapter, share.tokens) for share in block.shares]
        return list(lora.within(segments, self._own(block)))

    def _assembled(self, block: MicroBatch, outputs: PolicyOutputs | ValueOutputs) -> tuple[Tensor, Tensor | None]:
        """Returns the scores and the entropy of all of the block's tokens."""
        count = sum(block.lengths)
        entropy = None if outputs.entropy is None else self._sequence.assembled(outputs.entropy, count)
        return self._sequence.assembled(outputs.scores, count), entropy

    def _own(self, block: MicroBatch) -> slice:
        return self._sequence.own(sum(block.lengths))

    def _targets(self, block: MicroBatch) -> Tensor:
        """Returns int64 [T, widest K], 0 where a datum's K is smaller. One copy to the device for all Ops."""
        parts = []
        for share in block.shares:
            column = self._jobs[share.job].inputs["target_tokens"]
            parts.append(column.block(share.datums, max(share.lengths))[_no_padding(share)])
        widest = max(part.shape[1] for part in parts)
        return self._moved(np.concatenate([np.pad(part, ((0, 0), (0, widest - part.shape[1]))) for part in parts]))

    def _losses(self, block: MicroBatch, scores: Tensor, entropy: Tensor | None) -> Tensor:
        """Records the losses of these scores; returns their gradient in the scores, fp32 [T, K]."""
        seed = torch.zeros_like(scores)
        start = 0
        for share in block.shares:
            rows = slice(start, start + share.tokens)
            start += share.tokens
            job = self._jobs[share.job]
            width = job.score_column.width(share.datums)
            own = entropy[rows] if entropy is not None and asks_entropy(job.op) else None
            seed[rows, :width] = self._loss(job, share, scores[rows, :width], own)
        return seed

    def _loss(self, job: Job, share: Share, scores: Tensor, entropy: Tensor | None) -> Tensor:
        """Records the results of one share; returns the loss's gradient in its scores, zero for bad datums."""
        places = self._places(share)
        padded = _padded(scores, places, share)
        where = job.score_column.positions(share.datums, max(share.lengths))
        real = where >= 0
        job.scores[self._moved(where[real])] = padded.flatten()[self._moved(np.flatnonzero(real))]
        inputs = {name: self._block(each, share) for name, each in job.inputs.items() if name != "target_tokens"}
        entropies = None if entropy is None else _padded(entropy, places, share)
        found = job.evaluate(share.datums, padded, inputs, self._moved(real), entropies)
        return job.note(self._moved(share.datums), found).flatten(0, 1)[places]

    def _block(self, column: Column, share: Share) -> Tensor:
        return self._moved(column.block(share.datums, max(share.lengths)))

    def _places(self, share: Share) -> Tensor:
        """Returns int64 [tokens]: each token's place among the share's datums, padded to the longest.

        Made on the host: to pick by a mask, the host would wait for a GPU to count it.
        """
        return self._moved(np.flatnonzero(_no_padding(share)))

    def _moved(self, array: np.ndarray) -> Tensor:
        return moved(torch.from_numpy(array), self._device)

    def _keep_in_step(self) -> None:
        """Runs a pass over one token and drops the result, so that this rank joins the others' collectives.

        It is a token of the batch: the embedding of a padding token may be zero, and its norm then has no gradient.
        """
        first = self._batches[0].shares[0]
        token = self._jobs[first.job].tokens.flat(first.datums[:1])[:1]
        with torch.set_grad_enabled(self._backward):
            reader = self._engine.base.images
            hidden = self._engine.hidden_states(
                self._moved(token.astype(np.int64)),
                [1],
                [(None, 1)],
                hidden=self._critics,
                picture=reader.blank([1]) if reader and self._has_images else None,
            )
        with self._outputs():
            pass
        if hidden.requires_grad:
            hidden.backward(torch.zeros_like(hidden))

    def _collect(self) -> None:
        if self._backward:
            for job in self._jobs:
                job.state.collect()

    def _gather(self) -> None:
        """Gathers by a sum, exact to the bit: each datum counts on one rank and is zero on the others."""
        found = [found for job in self._jobs for found in (job.scores, *job.datums.values())]
        if self._sequence.rank:  # the first rank of the group has the same
            for one in found:
                one.zero_()
        if self._load is not None:  # ranks that share the tokens count their own, or all the same: metrics are ratios
            found.append(self._load)
            for job, load in zip(self._jobs, self._load, strict=True):
                job.load = load
        self._engine.ranks.sum_(found)
        if self._backward:
            for job in self._jobs:
                job.state.sum_found()


def _no_padding(share: Share) -> np.ndarray:
    """Returns bool [datums, longest]: False for padding."""
    found: np.ndarray = np.arange(max(share.lengths)) < np.array(share.lengths)[:, None]
    return found


def _padded(rows: Tensor, places: Tensor, share: Share) -> Tensor:
    """Splits [tokens, K] by datum into [n, L, K], with 0 for padding. `places`: see Pass._places."""
    padded = rows.new_zeros(len(share.lengths) * max(share.lengths), rows.shape[1])
    padded[places] = rows
    return padded.view(len(share.lengths), -1, rows.shape[1])
