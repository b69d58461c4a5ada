"""One pass: the datums of several ForwardBackward Ops through the base together, each Op under its own adapter.

A datum's rows never mix with another's, so a bad Op cannot touch its neighbours: its loss is cut from the backward
pass and its gradient is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from app.domain.batch import Ragged
from app.domain.losses import LOSSES
from app.domain.ops import ForwardBackward
from app.domain.results import ForwardBackwardOutput
from app.errors import UserOpError
from workers import lora
from workers.lora import Adapter
from workers.training.engine import Engine
from workers.training.logprobs import token_logprobs
from workers.training.losses import LOSS_FNS, LossValue
from workers.training.microbatches import Column, MicroBatch, cut


@dataclass(slots=True, eq=False)
class Job:
    """One Op of the pass, and what has been found for it.

    logprobs: fp32 [all target elements]; `datums` holds fp32 [number of datums] arrays: "bad" (not 0 where the loss or
    its gradient is not finite), "loss:sum" and the loss's own metrics. Both lie on the device.
    """

    op: ForwardBackward
    adapter: Adapter
    tokens: Column
    inputs: dict[str, Column]
    logprobs: Tensor
    datums: dict[str, Tensor]

    @classmethod
    def of(cls, op: ForwardBackward, adapter: Adapter, device: torch.device) -> Job:
        spec = LOSSES[op.loss_fn]
        wanted = {*spec.inputs, *spec.optional}
        inputs = {name: Column(ragged) for name, ragged in op.batch.inputs.items() if name in wanted}
        logprobs = torch.zeros(len(op.batch.inputs["target_tokens"].values), device=device)
        # A rank without a datum of this Op sums with those that have some, so the names are fixed beforehand.
        blank = torch.zeros(0, 1, 1)
        metrics = _differentiate(op, blank, dict.fromkeys(inputs, blank), blank.bool())[1].metrics
        datums = {name: torch.zeros(len(op.batch), device=device) for name in ("bad", "loss:sum", *metrics)}
        return cls(op, adapter, Column(op.batch.tokens), inputs, logprobs, datums)


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
        del parts
        gradients = [self._loss(batch, i, found.detach()) for i, found in enumerate(logprobs)]
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

    def _loss(self, batch: MicroBatch, index: int, logprobs: Tensor) -> Tensor:
        """Note the results of one share; returns the loss's gradient in its logprobs, zero for bad datums."""
        share = batch.shares[index]
        job = self._jobs[share.op]
        where = torch.from_numpy(job.inputs["target_tokens"].positions(share.datums, batch.length)).to(self._device)
        real = where >= 0
        job.logprobs[where[real]] = logprobs[real]
        inputs = {name: self._block(column, share.datums, batch) for name, column in job.inputs.items()}
        losses, value, gradient = _differentiate(job.op, logprobs, inputs, real)
        bad = ~(losses.isfinite() & gradient.isfinite().all(-1).all(-1))
        datums = torch.from_numpy(share.datums).to(self._device)
        job.datums["bad"][datums] = bad.float()
        job.datums["loss:sum"][datums] = losses
        for name, per_token in value.metrics.items():
            job.datums[name][datums] = _reduce(name, torch.where(real, per_token, 0.0))
        return torch.where(bad[:, None, None], 0.0, gradient)

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
                ranks.sum_(_gradients(job.adapter))


def take_gradients(job: Job) -> list[Tensor]:
    """The pass's gradient, which is removed from the adapter. Raises UserOpError when it, or a loss, is not finite."""
    gradients = _gradients(job.adapter)
    for parameter in job.adapter.tensors().values():
        parameter.grad = None
    check_finite(job)
    if not get_total_norm(gradients).isfinite():
        raise UserOpError("every loss is finite but the gradient is not; nothing was added to the pending gradient")
    return gradients


def check_finite(job: Job) -> None:
    """Raises UserOpError naming the first datum whose loss, or its gradient, is not finite."""
    bad = job.datums["bad"].nonzero()
    if len(bad):
        datum = int(bad[0])
        raise UserOpError(
            f"datum {datum}: its {job.op.loss_fn} loss is {job.datums['loss:sum'][datum].item()} and the loss or its "
            "gradient is not finite; look at its logprobs, weights and advantages. The model is unchanged"
        )


def output(job: Job) -> ForwardBackwardOutput:
    """What the Op's future carries."""
    shapes = job.op.batch.inputs["target_tokens"].shapes
    found = {name: t.double().cpu() for name, t in job.datums.items() if name != "bad"}
    metrics = {name: float(t.amax() if name.endswith(":max") and len(t) else t.sum()) for name, t in found.items()}
    metrics["tokens:sum"] = float(sum(job.tokens.lengths))
    return ForwardBackwardOutput(Ragged(job.logprobs.cpu().numpy(), shapes), metrics)


def _differentiate(
    op: ForwardBackward, logprobs: Tensor, inputs: dict[str, Tensor], real: Tensor
) -> tuple[Tensor, LossValue, Tensor]:
    """(loss of each datum [n], the loss's value, gradient [n, L, K]), on the small tensors only."""
    config = {**LOSSES[op.loss_fn].config, **op.loss_config}
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        value = LOSS_FNS[op.loss_fn](leaf, inputs, config)
        losses = torch.where(real, value.per_token, 0.0).sum((1, 2))
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), value, gradient


def _reduce(name: str, per_token: Tensor) -> Tensor:
    return per_token.amax((1, 2)) if name.endswith(":max") else per_token.sum((1, 2))


def _gradients(adapter: Adapter) -> list[Tensor]:
    """Zeros where no backward pass came by: with several ranks, one may have had no datum of this adapter."""
    for parameter in adapter.tensors().values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in adapter.tensors().values() if parameter.grad is not None]
