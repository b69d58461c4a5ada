"""One pass: the datums of several ForwardBackward Ops run through the base together, each Op under its own adapter.

A datum's tokens never see another's, so a bad Op cannot affect its neighbours: its loss is cut from the backward pass
and its gradient is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from workers.backends.training.batch_ops import Job, asks_entropy
from workers.backends.training.engine import Engine
from workers.backends.training.lm_head import LmHead
from workers.backends.training.microbatches import Column, MicroBatch, Share, cut
from workers.backends.training.outputs import CHUNK_ROWS, PolicyOutputs, ValueOutputs
from workers.models.lora import Adapter

Outputs = Callable[[MicroBatch, Tensor], PolicyOutputs | ValueOutputs]
"""Computes the outputs of a block from its hidden states [T, hidden size]."""


class Pass:
    """Runs jobs on this rank's share of the micro-batches.

    All jobs are forward-only or none is; all are critics or none is.
    """

    def __init__(self, engine: Engine, jobs: Sequence[Job], micro_batch_tokens: int) -> None:
        self._engine = engine
        self._jobs = jobs
        self._device = engine.base.device
        self._backward = not jobs[0].op.forward_only
        self._critics = jobs[0].critic
        lengths = [job.tokens.lengths for job in jobs]
        self._batches = cut(lengths, micro_batch_tokens, packed=engine.hidden_states.packed)

    def run(self, progress: Callable[[], None]) -> None:
        """Fills every job's scores and datums, and unless forward-only the found gradient of its state, from all ranks.

        `progress` is called after each micro-batch.
        """
        ranks = self._engine.ranks
        rounds = -(-len(self._batches) // ranks.size)
        for i in range(rounds):
            mine = i * ranks.size + ranks.rank
            if mine < len(self._batches):
                self._run(self._batches[mine])
            elif self._engine.in_step:
                self._keep_in_step()
            if self._backward:
                self._collect()
            progress()
        self._engine.rest()
        self._gather()

    def _run(self, batch: MicroBatch) -> None:
        tokens = np.concatenate([self._jobs[share.op].tokens.flat(share.datums) for share in batch.shares])
        owners = [(self._jobs[share.op].adapter, len(share.datums)) for share in batch.shares]
        with torch.set_grad_enabled(self._backward):
            hidden = self._engine.hidden_states(
                self._moved(tokens.astype(np.int64)), batch.lengths, owners, hidden=self._critics
            )
        gradient = torch.zeros_like(hidden, requires_grad=False) if self._backward else None
        with torch.no_grad(), self._outputs() as outputs_of:
            for rows, block in batch.blocks(CHUNK_ROWS[self._device.type]):
                outputs = outputs_of(block, hidden[rows])
                seed = self._losses(block, outputs.scores, outputs.entropy)
                if gradient is not None:
                    gradient[rows] = outputs.gradient(seed)
        if hidden.requires_grad:
            hidden.backward(gradient)

    @contextmanager
    def _outputs(self) -> Iterator[Outputs]:
        """Yields the function that computes policy or value outputs.

        For policies this is a collective (see Engine.head); a critic makes no logits.
        """
        if self._critics:
            yield self._values
            return
        with self._engine.head() as head:
            yield partial(self._logprobs, head)

    def _logprobs(self, head: LmHead, block: MicroBatch, hidden: Tensor) -> PolicyOutputs:
        asked = any(asks_entropy(self._jobs[share.op].op) for share in block.shares)
        targets = self._targets(block)
        return PolicyOutputs(head, hidden, targets, self._owners(block), keep=self._backward, entropy=asked)

    def _values(self, block: MicroBatch, hidden: Tensor) -> ValueOutputs:
        return ValueOutputs(hidden, self._owners(block))

    def _owners(self, block: MicroBatch) -> list[tuple[Adapter | None, int]]:
        return [(self._jobs[share.op].adapter, share.tokens) for share in block.shares]

    def _targets(self, block: MicroBatch) -> Tensor:
        """Returns int64 [T, widest K], 0 where a datum's K is smaller."""
        parts = []
        for share in block.shares:
            column = self._jobs[share.op].inputs["target_tokens"]
            parts.append(self._block(column, share)[self._real(share)])
        widest = max(part.shape[1] for part in parts)
        return torch.cat([nn.functional.pad(part, (0, widest - part.shape[1])) for part in parts])

    def _losses(self, block: MicroBatch, scores: Tensor, entropy: Tensor | None) -> Tensor:
        """Records the losses of these scores; returns their gradient in the scores, fp32 [T, K]."""
        seed = torch.zeros_like(scores)
        start = 0
        for share in block.shares:
            rows = slice(start, start + share.tokens)
            start += share.tokens
            job = self._jobs[share.op]
            width = job.scored.width(share.datums)
            own = entropy[rows] if entropy is not None and asks_entropy(job.op) else None
            seed[rows, :width] = self._loss(job, share, scores[rows, :width], own)
        return seed

    def _loss(self, job: Job, share: Share, scores: Tensor, entropy: Tensor | None) -> Tensor:
        """Records the results of one share; returns the loss's gradient in its scores, zero for bad datums."""
        real_rows = self._real(share)
        padded = _padded(scores, real_rows)
        where = self._moved(job.scored.positions(share.datums, max(share.lengths)))
        real = where >= 0
        job.scores[where[real]] = padded[real]
        inputs = {name: self._block(column, share) for name, column in job.inputs.items()}
        entropies = None if entropy is None else _padded(entropy, real_rows)
        found = job.evaluate(share.datums, padded, inputs, real, entropies)
        return job.note(self._moved(share.datums), found)[real_rows]

    def _block(self, column: Column, share: Share) -> Tensor:
        return self._moved(column.block(share.datums, max(share.lengths)))

    def _real(self, share: Share) -> Tensor:
        """Returns bool [datums, longest]: True where a token is."""
        return self._moved(np.arange(max(share.lengths)) < np.array(share.lengths)[:, None])

    def _moved(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _keep_in_step(self) -> None:
        """Runs a pass over one token and drops the result, so that this rank joins the others' collectives."""
        with torch.set_grad_enabled(self._backward):
            hidden = self._engine.hidden_states(
                self._moved(np.zeros(1, np.int64)), [1], [(None, 1)], hidden=self._critics
            )
        with self._outputs():
            pass
        if hidden.requires_grad:
            hidden.backward(torch.zeros_like(hidden))

    def _collect(self) -> None:
        for job in self._jobs:
            job.state.collect()

    def _gather(self) -> None:
        """Gathers by a sum, exact to the bit: each datum was computed on one rank and is zero on the others."""
        ranks = self._engine.ranks
        ranks.sum_([found for job in self._jobs for found in (job.scores, *job.datums.values())])
        if self._backward:
            for job in self._jobs:
                job.state.sum_found()


def _padded(rows: Tensor, real: Tensor) -> Tensor:
    """Splits [T, K] by datum into [n, L, K], with 0 for padding; bool [n, L] says where a token is."""
    padded = rows.new_zeros(*real.shape, rows.shape[1])
    padded[real] = rows
    return padded
