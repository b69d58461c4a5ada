"""Runs one journalled Op on the backend: what it does to the model, and what its commit records.

In a replay the same Op goes through `replay`: the same change to the model, nothing written and nothing answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from app.domain import codec, records
from app.domain.ops import CreateModel, DropGradients, LoadWeights, Op, SaveWeights
from app.domain.results import Done, Output, Result
from app.errors import NotFound, OpError, UserOpError
from app.stores.interfaces import Entry, Lease, ObjectStore, Records, Write
from workers import checkpoints, results
from workers.saving import Saver
from workers.training.base import BackendOp, Create, Load, TrainingBackend

SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Executor:
    backend: TrainingBackend
    index: Records
    store: ObjectStore
    cache_dir: Path
    saver: Saver

    def run(self, lease: Lease, entry: Entry) -> tuple[Result, list[Write]]:
        """Raises OpError; the model is then as it was before."""
        if entry.kind == SKIP:
            return results.of_output(Done()), []
        if entry.doomed and entry.kind != DropGradients.kind:
            raise UserOpError(entry.doomed)
        op = _decode(entry)
        if isinstance(op, SaveWeights):
            return self.saver.save(lease, entry.seq, op)
        output = self._apply(lease.model_id, op)
        if isinstance(op, CreateModel):
            ready = {"state": json.dumps("ready"), "lora": json.dumps(asdict(op.spec.lora))}
            return results.of_json({"model_id": lease.model_id}), [(records.Model.namespace, lease.model_id, ready)]
        return results.of_output(output), []

    def replay(self, lease: Lease, entry: Entry) -> None:
        """Saves wrote what they wrote; refused, failed and doomed Ops changed nothing."""
        doomed = entry.doomed and entry.kind != DropGradients.kind
        if not doomed and entry.kind not in (SKIP, SaveWeights.kind):
            self._apply(lease.model_id, _decode(entry))

    def restore(self, model_id: str, prefix: str) -> None:
        """Bring a model back from a snapshot, dropping whatever state it had here."""
        manifest = checkpoints.read_manifest(self.store, prefix)
        with self._fetched(prefix) as folder:
            self._backend_apply(model_id, Create(manifest.lora, folder, optimizer=True))

    def _apply(self, model_id: str, op: Op) -> Output:
        match op:
            case CreateModel():
                if op.source is None:
                    return self._backend_apply(model_id, Create(op.spec.lora))
                with self._source(op.source) as folder:
                    return self._backend_apply(model_id, Create(op.spec.lora, folder, op.optimizer))
            case LoadWeights():
                with self._source(op.source) as folder:
                    return self._backend_apply(model_id, Load(folder, op.optimizer))
            case SaveWeights():
                raise TypeError("a save is no change to a model")
            case _:
                return self._backend_apply(model_id, op)

    def _backend_apply(self, model_id: str, op: BackendOp) -> Output:
        outcome = self.backend.apply({model_id: op})[model_id]
        if isinstance(outcome, OpError):
            raise outcome
        return outcome

    @contextmanager
    def _source(self, path: str) -> Iterator[Path]:
        """The files of a checkpoint its owner named; what is read once is not worth keeping on disk."""
        stored = self.index.get(records.Checkpoint.namespace, path)
        try:
            if stored is None:
                raise NotFound(path)
            with self._fetched(records.load(records.Checkpoint, stored).prefix) as folder:
                yield folder
        except NotFound:
            raise UserOpError(
                f"no checkpoint at {path}: it was deleted or has expired; list what there is and load another"
            ) from None

    @contextmanager
    def _fetched(self, prefix: str) -> Iterator[Path]:
        try:
            yield checkpoints.fetch(self.store, prefix, self.cache_dir)
        finally:
            checkpoints.forget(prefix, self.cache_dir)


def _decode(entry: Entry) -> Op:
    op: Op = DropGradients() if entry.kind == DropGradients.kind else codec.decode(entry.payload)
    return op
