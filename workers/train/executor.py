"""Runs one journalled Op on the backend, builds what its commit records, and tracks gradients that no step has used.

No optim_step may run on part of its gradients. The SDK sends optim_step without waiting for the forward_backward before
it, so a step behind a lost gradient is the usual case. The state follows from the journal alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from app.domain import ops as domain_ops
from app.domain import progress, records
from app.domain.checkpoints import WINDOW, Manifest
from app.domain.ops import (
    FORWARD,
    FORWARD_BACKWARD,
    CreateModel,
    DropGradients,
    ForwardBackward,
    LoadWeights,
    Op,
    OptimStep,
    SaveWeights,
)
from app.domain.results import TRAINED, Output
from app.errors import NotFound, OpError, UserOpError, WeightsOverflow
from app.stores.disk import Disk
from app.stores.objects.base import ObjectStore
from app.stores.redis.types import Entry, Lease
from app.wire import results
from workers.backends.training.base import BackendOp, Create, Load, TrainingBackend
from workers.checkpoints import transfer
from workers.checkpoints.writer import DeferredWrite, Saver
from workers.process import telemetry
from workers.train.op_result import OpResult

LOST_BATCH = "lost_batch"
# Kinds of seqs that were refused or never arrived; these have no payload.
CONSUMED = ("skip", LOST_BATCH, DropGradients.kind)


@dataclass(frozen=True, slots=True)
class Executor:
    """Runs one journalled Op on the backend: changes the model, and returns what its commit records.

    In a replay the same Op goes through `replay`: it makes the same change to the model, writes nothing and answers
    nothing.
    """

    backend: TrainingBackend
    store: ObjectStore
    cache: Disk
    saver: Saver

    def run(self, lease: Lease, entry: Entry, accumulation: GradAccumulation) -> OpResult | DeferredWrite:
        """Runs the Op. For a save, returns the function that writes it, to be run beside the next Op.

        Raises OpError. The model is then unchanged, except that a failed optim_step drops the gradients, and that
        WeightsOverflow spoils it.
        """
        if entry.kind in CONSUMED:
            self._consume(lease.model_id, entry)
            return OpResult(results.of_json({}))
        try:
            return self._run(lease, entry, accumulation)
        except OpError:
            self.give_up(lease, entry)
            raise

    def run_together(self, started: Sequence[tuple[Lease, Entry, GradAccumulation]]) -> list[OpResult]:
        """Runs one forward, one forward_backward or one optim_step of several models in one call of the backend.
        Returns the results in the order of the Ops. The journal dooms none of the Ops. A failed optim_step drops its
        model's gradients."""
        failures = {lease.model_id: doom(entry, accumulation) for lease, entry, accumulation in started}
        ops: dict[str, ForwardBackward | OptimStep] = {
            lease.model_id: domain_ops.decode(entry.payload)
            for lease, entry, _ in started
            if not failures[lease.model_id]
        }
        outputs = self.backend.apply(ops)
        op_results: list[OpResult] = []
        for lease, entry, _ in started:
            model_id = lease.model_id
            output = outputs[model_id] if model_id in ops else UserOpError(failures[model_id])
            if isinstance(output, OpError):
                self.give_up(lease, entry)
                op_results.append(OpResult.failed(entry, output))
            else:
                op_results.append(_op_result(ops[model_id], output))
        return op_results

    def give_up(self, lease: Lease, entry: Entry) -> None:
        """Skips a failed Op. A failed step also drops its gradients; when they are sent again, none counts twice."""
        if entry.kind == OptimStep.kind:
            self._drop_gradients(lease.model_id)

    def replay(self, lease: Lease, entry: Entry) -> None:
        """Repeats the Op's change to the model. Forwards, saves and failed Ops changed nothing, but a failed step
        dropped the gradients."""
        if entry.kind in CONSUMED:
            self._consume(lease.model_id, entry)
        elif entry.doomed:
            self.give_up(lease, entry)
        elif entry.kind not in (SaveWeights.kind, FORWARD):
            with suppress(WeightsOverflow):  # an earlier version committed such a step as done
                self._apply(lease.model_id, domain_ops.decode(entry.payload))

    def restore(self, model_id: str, prefix: str) -> GradAccumulation:
        """Restores a model from a durable snapshot; returns its accumulation. Raises NotFound, Unavailable, OpError."""
        with self._fetched(prefix) as folder:
            return self.restore_from(model_id, folder, transfer.manifest_in(folder))

    def restore_from(self, model_id: str, folder: Path, manifest: Manifest) -> GradAccumulation:
        """Restores a model from a snapshot's folder, drops the state it had here, and returns its accumulation.
        Raises OpError."""
        op = Create(manifest.lora, folder, optimizer=True, critic=manifest.critic, gradients=True)
        self._backend_apply(model_id, op)
        if WINDOW not in manifest.files:
            return GradAccumulation()
        return GradAccumulation(**json.loads((folder / WINDOW).read_bytes()))

    def _run(self, lease: Lease, entry: Entry, accumulation: GradAccumulation) -> OpResult | DeferredWrite:
        failure = doom(entry, accumulation)
        if failure:
            raise UserOpError(failure)
        op: Op = domain_ops.decode(entry.payload)
        if isinstance(op, SaveWeights):
            return self.saver.save(lease, entry.seq, op)
        output = self._apply(lease.model_id, op)
        if isinstance(op, CreateModel):
            lora = {} if op.spec.lora is None else asdict(op.spec.lora)
            ready = {"state": json.dumps("ready"), "lora": json.dumps(lora)}
            created = results.of_call(op, {"model_id": lease.model_id})
            return OpResult(created, [(records.Model.namespace, lease.model_id, ready)])
        return _op_result(op, output)

    def _consume(self, model_id: str, entry: Entry) -> None:
        if entry.kind == DropGradients.kind:
            self._drop_gradients(model_id)

    def _drop_gradients(self, model_id: str) -> None:
        """Drops the gradients of a model. A model that the backend does not have, because its creation failed, has
        none: that is no error."""
        with suppress(OpError):
            self._apply(model_id, DropGradients())

    def _apply(self, model_id: str, op: Op) -> Output:
        match op:
            case CreateModel():
                spec = op.spec
                if op.source is None:
                    return self._backend_apply(model_id, Create(spec.lora, critic=spec.critic))
                with self._source(op.source, op.prefix) as folder:
                    return self._backend_apply(model_id, Create(spec.lora, folder, op.optimizer, spec.critic))
            case LoadWeights():
                with self._source(op.source, op.prefix) as folder:
                    return self._backend_apply(model_id, Load(folder, op.optimizer))
            case SaveWeights():
                raise TypeError("a save does not change a model")
            case _:
                return self._backend_apply(model_id, op)

    def _backend_apply(self, model_id: str, op: BackendOp) -> Output:
        outcome = self.backend.apply({model_id: op})[model_id]
        if isinstance(outcome, OpError):
            raise outcome
        return outcome

    @contextmanager
    def _source(self, path: str, prefix: str) -> Iterator[Path]:
        """The files that `path` named when the call was made. They are read once, so they are not kept on disk."""
        try:
            with self._fetched(prefix) as folder:
                yield folder
        except NotFound:
            raise UserOpError(
                f"no checkpoint at {path}: it was deleted or has expired; list the checkpoints and load another"
            ) from None

    @contextmanager
    def _fetched(self, prefix: str) -> Iterator[Path]:
        try:
            yield transfer.fetch(self.store, prefix, self.cache.folder, check_room=self.cache.check)
        finally:
            # On a full disk even this may fail. The remaining files are correct, and the next start removes them.
            with suppress(OSError):
                transfer.forget(prefix, self.cache.folder)


def _op_result(op: Op, output: Output) -> OpResult:
    """The result of a live run; its usage is counted once it is committed."""
    if not isinstance(op, ForwardBackward):
        return OpResult(results.of_output(op, output), point=progress.point_of(op, output))
    tokens = len(op.batch.tokens.values)
    telemetry.TOKENS.labels("trained").inc(tokens)
    return OpResult(results.of_output(op, output), usage={TRAINED: tokens}, point=progress.point_of(op, output))


def doom(entry: Entry, accumulation: GradAccumulation) -> str:
    """The reason why `entry` must fail instead of running; empty when it may run."""
    if entry.kind == OptimStep.kind and accumulation.missing:
        return (
            f"no step was taken, because a gradient it needs is missing ({accumulation.missing}); the other gradients "
            "were dropped: run the batch again"
        )
    return entry.doomed


@dataclass(frozen=True, slots=True)
class GradAccumulation:
    """The gradient accumulation window. `missing` names the call whose gradient was lost; an optim_step then fails.

    A forward_backward that was refused at once may be sent again. It replaces the lost one if nothing else was added.
    Otherwise a batch sent again looks the same as a further part of the batch, and the gradients already added might
    count twice. Nothing replaces a forward_backward that failed when it ran, as its client may have sent the next part
    before it knew.
    """

    added: bool = False
    missing: str = ""
    beyond_repair: bool = False

    def after(self, entry: Entry, failure: str) -> GradAccumulation:
        """The accumulation after `entry` has run; `failure` is empty for success."""
        if entry.kind == FORWARD_BACKWARD:
            return GradAccumulation(True, failure, beyond_repair=True) if failure else self._add()
        if entry.kind == LOST_BATCH:
            return self._lose(entry.doomed)
        if entry.kind == DropGradients.kind:
            return GradAccumulation(missing=entry.doomed)
        if entry.kind == OptimStep.kind or (entry.kind in (CreateModel.kind, LoadWeights.kind) and not failure):
            return GradAccumulation()
        return self

    def _add(self) -> GradAccumulation:
        return replace(self, added=True) if self.beyond_repair else GradAccumulation(added=True)

    def _lose(self, reason: str) -> GradAccumulation:
        return replace(self, missing=reason, beyond_repair=self.beyond_repair or self.added)
