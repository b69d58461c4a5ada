"""Writing a model out: checkpoints and sampler adapters for their owner, snapshots for ourselves."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app import ids
from app.domain import records
from app.domain.checkpoints import Manifest
from app.domain.ops import LoraSpec, SaveWeights
from app.domain.results import Result
from app.errors import NotFound, Unavailable, UserOpError
from app.stores.interfaces import Lease, ObjectStore, Records, Write
from workers import checkpoints, results
from workers.training.base import TrainingBackend

SNAPSHOT = "snapshots"
_WITH_OPTIMIZER = ("weights", SNAPSHOT)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder to write into. A full disk passes, like a store that is away, and says nothing of the model."""
    try:
        with tempfile.TemporaryDirectory(prefix="tinsmith-save-") as temporary:
            yield Path(temporary)
    except OSError as error:
        raise Unavailable(f"the weights cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class Saver:
    backend: TrainingBackend
    index: Records
    store: ObjectStore

    def save(self, lease: Lease, seq: int, op: SaveWeights) -> tuple[Result, list[Write]]:
        """The files first, then what the commit records. Raises UserOpError for a name that is taken."""
        if op.sampling_session_id:
            return self._ephemeral(lease, seq, op)
        path = ids.TinkerPath(lease.model_id, op.checkpoint_kind, op.name)
        if not op.overwrite and self._taken(str(path)):
            raise UserOpError(f"{path} is there already; pass overwrite, or save under another name")
        model = self._model(lease.model_id)
        prefix, manifest = self._write(lease, seq, model, op.checkpoint_kind, op.name, str(path), op.user_metadata)
        now = time.time()
        checkpoint = records.Checkpoint(
            owner=model.owner,
            model_id=lease.model_id,
            kind=op.checkpoint_kind,
            base_model=model.base_model,
            prefix=prefix,
            created=now,
            size_bytes=sum(entry.size for entry in manifest.files.values()),
            lora=model.lora,
            files=sorted(manifest.files),
            expires_at=None if op.ttl_seconds is None else now + op.ttl_seconds,
            user_metadata=dict(op.user_metadata),
        )
        return results.of_json({"path": str(path)}), [(checkpoint.namespace, str(path), records.dump(checkpoint))]

    def snapshot(self, lease: Lease, seq: int) -> str:
        """The whole training state, under a prefix of its own, which is returned."""
        model = self._model(lease.model_id)
        return self._write(lease, seq, model, SNAPSHOT, str(seq))[0]

    def _ephemeral(self, lease: Lease, seq: int, op: SaveWeights) -> tuple[Result, list[Write]]:
        model = self._model(lease.model_id)
        prefix, _ = self._write(lease, seq, model, op.checkpoint_kind, op.name)
        sampler = records.Sampler(
            owner=model.owner,
            session_id=model.session_id,
            base_model=model.base_model,
            created=time.time(),
            prefix=prefix,
        )
        answer = results.of_json({"sampling_session_id": op.sampling_session_id})
        return answer, [(sampler.namespace, op.sampling_session_id or "", records.dump(sampler))]

    def _write(
        self,
        lease: Lease,
        seq: int,
        model: records.Model,
        kind: str,
        name: str,
        path: str = "",
        user_metadata: Mapping[str, str] | None = None,
    ) -> tuple[str, Manifest]:
        generation = f"{seq}-{lease.epoch}"
        prefix = checkpoints.prefix_for(lease.model_id, kind, name, generation)
        with _scratch() as folder:
            self.backend.save(lease.model_id, folder, optimizer=kind in _WITH_OPTIMIZER)
            manifest = checkpoints.write(
                self.store,
                prefix,
                folder,
                path=path,
                generation=generation,
                model_id=lease.model_id,
                owner=model.owner,
                base_model=model.base_model,
                lora=LoraSpec(**model.lora),
                seq=seq,
                epoch=lease.epoch,
                user_metadata=user_metadata,
            )
        return prefix, manifest

    def _taken(self, path: str) -> bool:
        stored = self.index.get(records.Checkpoint.namespace, path)
        if stored is None:
            return False
        expires = records.load(records.Checkpoint, stored).expires_at
        return expires is None or expires > time.time()

    def _model(self, model_id: str) -> records.Model:
        stored = self.index.get(records.Model.namespace, model_id)
        if stored is None:
            raise NotFound(f"no model {model_id!r}")
        return records.load(records.Model, stored)
