"""One pass: the datums of several ForwardBackward Ops through the base together, each Op under its own adapter.

A datum's rows never mix with another's, so a bad Op cannot touch its neighbours: its loss is cut from the backward
pass and its gradient is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from workers import lora
from workers.training.engine import Engine
from workers.training.jobs import Job, asks_entropy
from workers.training.logprobs import token_entropy, token_logprobs
from workers.training.microbatches import Column, MicroBatch, cut


class Pass:
    """Runs jobs that are all forward-only, or all not, on this rank's share of the micro-batches."""

    def __init__(self, engine: Engine, jobs: Sequence[Job], micro_batch_tokens: int) -> None:
        self._engine = engine
        self._jobs = jobs
        self._device = engine.base.device
        self._backward = not jobs[0].op.forward_only
        self._batches = cut([job.tokens.lengths for job in jobs], micro_batch_tokens)

    def run(self, moved: Callable[[], None]) -> None:
        """Fill every job's logprobs and datums, and its adapter's `.grad` unless forward-only, from all ranks.

        `moved` is called after each micro-batch.
        """
        ranks = self._engine.ranks
        rounds = -(-len(self._batches) // ranks.size)
        for i in range(rounds):
            mine = i * ranks.size + ranks.rank
            if mine < len(self._batches):
                self._run(self._batches[mine])
            elif self._engine.in_step:
                self._keep_in_step()
            moved()
        self._engine.rest()
        self._gather()

    def _run(self, batch: MicroBatch) -> None:
        parts = self._logits(batch)
        with torch.set_grad_enabled(self._backward):
            logprobs = [
                token_logprobs(part, self._block(self._jobs[share.op].inputs["target_tokens"], share.datums, batch))
                for share, part in zip(batch.shares, parts, strict=True)
            ]
        entropies = [
            token_entropy(part) if asks_entropy(self._jobs[share.op].op) else None
            for share, part in zip(batch.shares, parts, strict=True)
        ]
        del parts
        gradients = [self._loss(batch, i, found.detach(), entropies[i]) for i, found in enumerate(logprobs)]
        if self._backward:
            torch.autograd.backward(logprobs, gradients)

    def _logits(self, batch: MicroBatch) -> Sequence[Tensor]:
        """[datums, L, V] for each share."""
        counts = [len(share.datums) for share in batch.shares]
        jobs = [self._jobs[share.op] for share in batch.shares]
        blocks = [job.tokens.block(share.datums, batch.length) for job, share in zip(jobs, batch.shares, strict=True)]
        tokens = torch.from_numpy(np.concatenate(blocks)[:, :, 0].astype(np.int64)).to(self._device)
        segments = [(job.adapter, count) for job, count in zip(jobs, counts, strict=True)]
        with torch.set_grad_enabled(self._backward), lora.use(segments):
            logits = self._engine.logits(tokens)
            return torch.split(logits, counts) if len(counts) > 1 else [logits]

    def _loss(self, batch: MicroBatch, index: int, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        """Note the results of one share; returns the loss's gradient in its logprobs, zero for bad datums."""
        share = batch.shares[index]
        job = self._jobs[share.op]
        where = torch.from_numpy(job.inputs["target_tokens"].positions(share.datums, batch.length)).to(self._device)
        real = where >= 0
        job.logprobs[where[real]] = logprobs[real]
        inputs = {name: self._block(column, share.datums, batch) for name, column in job.inputs.items()}
        datums = torch.from_numpy(share.datums).to(self._device)
        return job.note(datums, job.evaluate(share.datums, logprobs, inputs, real, entropy))

    def _block(self, column: Column, datums: np.ndarray, batch: MicroBatch) -> Tensor:
        return torch.from_numpy(column.block(datums, batch.length)).to(self._device)

    def _keep_in_step(self) -> None:
        """A pass over one token that counts for nothing, so that this rank takes part in the others' collectives."""
        with torch.set_grad_enabled(self._backward), lora.use([]):
            logits = self._engine.logits(torch.zeros(1, 1, dtype=torch.int64, device=self._device))
        if self._backward:
            (logits.sum() * 0.0).backward()  # type: ignore[no-untyped-call]

    def _gather(self) -> None:
        """Each datum was computed on one rank and is zero on the others, so a sum is a gather, to the bit."""
        ranks = self._engine.ranks
        ranks.sum_([found for job in self._jobs for found in (job.logprobs, *job.datums.values())])
        if self._backward:
            for job in self._jobs:
                ranks.sum_(job.gradients())
