"""Writing a model out for its owner: checkpoints and sampler adapters. Also what a snapshot's manifest says."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from app import ids
from app.domain import records
from app.domain.checkpoints import Manifest
from app.domain.ops import LoraSpec, SaveWeights
from app.domain.results import Result
from app.errors import NotFound, Unavailable, UserOpError
from app.stores.interfaces import Lease, ObjectStore, Records, Write
from workers import checkpoints, results
from workers.training.base import TrainingBackend, Writer

Outcome = tuple[Result, list[Write]]
"""The answer, and what the commit records."""
Unwritten = Callable[[], Outcome]
"""Writes and uploads what was captured, from any thread. Raises Unavailable, Fenced, NotFound (the model is gone)."""
_WITH_OPTIMIZER = "weights"


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder to write into. A full disk passes, like a store that is away, and says nothing of the model."""
    try:
        with tempfile.TemporaryDirectory(prefix="tinsmith-save-") as temporary:
            yield Path(temporary)
    except OSError as error:
        raise Unavailable(f"the weights cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class Captured:
    """A copy of a model as it was when `op`, its Op at `seq`, ran: at `created`, by the state server's clock."""

    lease: Lease
    seq: int
    op: SaveWeights
    model: records.Model
    created: float
    write: Writer


@dataclass(frozen=True, slots=True)
class Saver:
    backend: TrainingBackend
    index: Records
    store: ObjectStore

    def save(self, lease: Lease, seq: int, op: SaveWeights) -> Unwritten:
        """Copy the model as it is, to be written beside the next Ops. Raises UserOpError for a name that is taken."""
        path = ids.TinkerPath(lease.model_id, op.checkpoint_kind, op.name)
        if not op.sampling_session_id and not op.overwrite and self._taken(str(path)):
            raise UserOpError(f"{path} is there already; pass overwrite, or save under another name")
        model, now = self._model(lease.model_id), self.index.now()
        captured = Captured(lease, seq, op, model, now, self._capture(lease.model_id, op))
        return partial(self._ephemeral, captured) if op.sampling_session_id else partial(self._named, captured, path)

    def _named(self, captured: Captured, path: ids.TinkerPath) -> Outcome:
        """The files first, then what the commit records."""
        op, model, created = captured.op, captured.model, captured.created
        expires_at = None if op.ttl_seconds is None else created + op.ttl_seconds
        prefix, manifest = self._write(captured, str(path), expires_at)
        checkpoint = records.Checkpoint(
            owner=model.owner,
            model_id=captured.lease.model_id,
            kind=op.checkpoint_kind,
            base_model=model.base_model,
            prefix=prefix,
            created=created,
            size_bytes=sum(entry.size for entry in manifest.files.values()),
            lora=model.lora,
            files=sorted(manifest.files),
            expires_at=manifest.expires_at,
            user_metadata=dict(op.user_metadata),
            critic=model.critic,
        )
        return results.of_json({"path": str(path)}), [(checkpoint.namespace, str(path), records.dump(checkpoint))]

    def _ephemeral(self, captured: Captured) -> Outcome:
        prefix, _ = self._write(captured)
        model, name = captured.model, captured.op.sampling_session_id
        sampler = records.Sampler(
            owner=model.owner,
            session_id=model.session_id,
            base_model=model.base_model,
            created=captured.created,
            prefix=prefix,
        )
        return results.of_json({"sampling_session_id": name}), [(sampler.namespace, name or "", records.dump(sampler))]

    def describe(
        self,
        folder: Path,
        lease: Lease,
        seq: int,
        path: str = "",
        user_metadata: Mapping[str, str] | None = None,
        expires_at: float | None = None,
    ) -> Manifest:
        """The manifest of files written in `folder`, of the model as it was behind `seq`. Raises NotFound."""
        model = self._model(lease.model_id)
        return checkpoints.describe(
            folder,
            path=path,
            generation=f"{seq}-{lease.epoch}",
            model_id=lease.model_id,
            owner=model.owner,
            base_model=model.base_model,
            lora=None if model.full else LoraSpec(**model.lora),
            critic=model.critic,
            seq=seq,
            epoch=lease.epoch,
            user_metadata=user_metadata,
            expires_at=expires_at,
        )

    def _write(self, captured: Captured, path: str = "", expires_at: float | None = None) -> tuple[str, Manifest]:
        lease, seq, op = captured.lease, captured.seq, captured.op
        prefix = checkpoints.prefix_for(lease.model_id, op.checkpoint_kind, op.name, f"{seq}-{lease.epoch}")
        with _scratch() as folder:
            captured.write(folder)
            manifest = self.describe(folder, lease, seq, path, op.user_metadata, expires_at)
            return prefix, checkpoints.upload(self.store, prefix, folder, manifest)

    def _capture(self, model_id: str, op: SaveWeights) -> Writer:
        if op.merged:
            return self.backend.export(model_id)
        return self.backend.capture(model_id, optimizer=op.checkpoint_kind == _WITH_OPTIMIZER)

    def _taken(self, path: str) -> bool:
        stored = self.index.get(records.Checkpoint.namespace, path)
        return stored is not None and not records.load(records.Checkpoint, stored).is_expired(self.index.now())

    def _model(self, model_id: str) -> records.Model:
        stored = self.index.get(records.Model.namespace, model_id)
        if stored is None:
            raise NotFound(f"no model {model_id!r}")
        return records.load(records.Model, stored)
