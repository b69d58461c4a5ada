"""Writes a model out for its owner: checkpoints and sampler adapters, encrypted for their recipients if requested.

Encrypted files are in the age format (age-encryption.org): `age -d` reads them anywhere.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyrage

from app import ids
from app.domain.checkpoints import ENCRYPTED, UNHASHED, CheckpointPrefix, Expiry, Manifest
from app.domain.ops import LoraSpec, SaveWeights
from app.domain.records import Checkpoint, Model, Sampler, ShmTransfer
from app.domain.results import SAVED
from app.errors import NotFound, Unavailable, UserOpError
from app.stores.disk import Disk
from app.stores.objects.base import ObjectStore
from app.stores.redis.records import RedisRecords, dump
from app.stores.redis.types import Lease
from app.wire import results
from app.wire.recipients import age_recipient
from workers.backends.training.base import TrainingBackend, Writer
from workers.checkpoints import transfer
from workers.checkpoints.shm_transfer import ShmTransfers
from workers.train.op_result import OpResult

ProjectTtl = Callable[[str], int | None]
"""The TTL, in seconds, of a project's checkpoints that get none of their own."""
DeferredWrite = Callable[[], OpResult]
"""Writes and uploads the captured files, from any thread. Raises Unavailable, Fenced, NotFound (the model is gone)."""


_WITH_OPTIMIZER = "weights"
_FOR_EVER = Expiry()


@dataclass(frozen=True, slots=True)
class Captured:
    """A copy of a model at the time when `op`, its Op at `seq`, ran: at `created`, by the state server's clock."""

    lease: Lease
    seq: int
    op: SaveWeights
    model: Model
    created: float
    write: Writer

    @property
    def place(self) -> CheckpointPrefix:
        lease, op = self.lease, self.op
        return CheckpointPrefix(lease.model_id, op.checkpoint_kind, op.name, lease.epoch, self.seq)


@dataclass(frozen=True, slots=True)
class Saver:
    """Writes checkpoints and adapters to `scratch` before their upload. A killed process leaves its files there; the
    worker's next process removes them."""

    backend: TrainingBackend
    records: RedisRecords
    store: ObjectStore
    shm_transfers: ShmTransfers
    project_ttl_s: ProjectTtl
    scratch: Disk

    def save(self, lease: Lease, seq: int, op: SaveWeights) -> DeferredWrite:
        """Copies the model's state and returns a function that writes it beside the next Ops. Raises UserOpError for a
        name that is taken."""
        path = ids.TinkerPath(lease.model_id, op.checkpoint_kind, op.name)
        if not op.sampling_session_id and not op.overwrite and self._taken(str(path)):
            raise UserOpError(f"{path} already exists; pass overwrite, or save under another name")
        model, now = self._model(lease.model_id), self.records.now()
        ephemeral = bool(op.sampling_session_id)
        captured = Captured(lease, seq, op, model, now, self._capture(lease.model_id, op, ephemeral=ephemeral))
        if ephemeral:
            return partial(self._ephemeral, captured)
        return partial(self._named, captured, path, Expiry.of(now, op.ttl_seconds, self.project_ttl_s(model.owner)))

    def _named(self, captured: Captured, path: ids.TinkerPath, expiry: Expiry) -> OpResult:
        """Writes the files of a named checkpoint, then returns the records of its commit."""
        op, model, created = captured.op, captured.model, captured.created
        prefix, manifest = self._write(captured, str(path), expiry)
        checkpoint = Checkpoint(
            owner=model.owner,
            model_id=captured.lease.model_id,
            kind=op.checkpoint_kind,
            base_model=model.base_model,
            prefix=prefix,
            created=created,
            size_bytes=manifest.size,
            lora=model.lora,
            files=sorted(manifest.files),
            expires_at=manifest.expires_at,
            user_metadata=dict(op.user_metadata),
            critic=model.critic,
            key=model.key,
            expiry_by=manifest.expiry_by,
        )
        write = (checkpoint.namespace, str(path), dump(checkpoint))
        return OpResult(results.of_call(op, {"path": str(path)}), [write], usage={SAVED: 1})

    def _ephemeral(self, captured: Captured) -> OpResult:
        """Writes a sampler adapter. It goes through shared memory and is uploaded after the commit; without room for
        that, it is uploaded before the commit."""
        lease, seq, op, model = captured.lease, captured.seq, captured.op, captured.model
        prefix, name = str(captured.place), op.sampling_session_id or ""
        sampler = Sampler(
            owner=model.owner,
            session_id=model.session_id,
            base_model=model.base_model,
            created=captured.created,
            prefix=prefix,
            follows=lease.model_id if op.inflight else "",
            full=model.full,
        )
        shared = self.shm_transfers.publish(prefix, partial(self._seal, captured), captured.write.size)
        size = self.shm_transfers.size(prefix) if shared else self._write(captured)[1].size
        writes = [(sampler.namespace, name, {**dump(sampler), "size_bytes": str(size)})]
        if op.inflight:
            writes.append((Model.namespace, lease.model_id, {"inflight": json.dumps(prefix)}))
        result = results.of_call(op, {"sampling_session_id": name})
        if not shared:
            return OpResult(result, writes)
        shm_transfer = ShmTransfer(lease.model_id, seq)
        writes.append((shm_transfer.namespace, prefix, dump(shm_transfer)))
        return OpResult(result, writes, partial(self.shm_transfers.upload, lease.model_id))

    def save_again(self, lease: Lease, prefix: str) -> None:
        """Rebuilds, from the current model, an adapter that was transferred and never uploaded. Raises NotFound,
        Unavailable."""
        place = CheckpointPrefix.of(prefix)
        op = SaveWeights(place.kind, place.name)
        model, then = self._model(lease.model_id), replace(lease, epoch=place.epoch)
        write = self._capture(lease.model_id, op, ephemeral=True)
        captured = Captured(then, place.seq, op, model, self.records.now(), write)
        if not self.shm_transfers.publish(prefix, partial(self._seal, captured), captured.write.size):
            with _new_folder(self.scratch.folder) as folder:
                self._seal(captured, folder)
                transfer.complete(self.store, prefix, folder)
            self.shm_transfers.delete_record(prefix)

    def describe(
        self,
        folder: Path,
        place: CheckpointPrefix,
        path: str = "",
        user_metadata: Mapping[str, str] | None = None,
        expiry: Expiry = _FOR_EVER,
        *,
        hashed: bool = True,
    ) -> Manifest:
        """The manifest of the files in `folder`, which `place` is for. Raises NotFound."""
        model = self._model(place.model_id)
        return transfer.describe(
            folder,
            path=path,
            generation=place.generation,
            model_id=place.model_id,
            owner=model.owner,
            base_model=model.base_model,
            lora=None if model.full else LoraSpec(**model.lora),
            critic=model.critic,
            seq=place.seq,
            epoch=place.epoch,
            user_metadata=user_metadata,
            expiry=expiry,
            hashed=hashed,
        )

    def _write(self, captured: Captured, path: str = "", expiry: Expiry = _FOR_EVER) -> tuple[str, Manifest]:
        place = captured.place
        with suppress(NotFound):
            # An earlier try of this worker wrote it all. A second write might outlast the model here once more.
            return str(place), transfer.read_manifest(self.store, str(place))
        with _new_folder(self.scratch.folder) as folder:
            self.scratch.check(captured.write.size)
            captured.write(folder)
            if captured.op.recipients:
                encrypt(folder, captured.op.recipients)
            manifest = self.describe(folder, place, path, captured.op.user_metadata, expiry)
            return str(place), transfer.upload(self.store, str(place), folder, manifest)

    def _seal(self, captured: Captured, folder: Path) -> None:
        """Fills a folder for a shared-memory transfer and seals it. Samplers do not wait for a sha256: it takes 11 s
        for the 16 GB of an 8B model, at 1.5 GB/s."""
        captured.write(folder)
        transfer.seal(folder, self.describe(folder, captured.place, hashed=False), UNHASHED)

    def _capture(self, model_id: str, op: SaveWeights, *, ephemeral: bool) -> Writer:
        """Copies what `op` saves. Only samplers of the base read an ephemeral copy, and they round it all the same."""
        if op.merged:
            return self.backend.export(model_id)
        return self.backend.capture(model_id, optimizer=op.checkpoint_kind == _WITH_OPTIMIZER, rounded=ephemeral)

    def _taken(self, path: str) -> bool:
        stored = self.records.find(Checkpoint, path)
        return stored is not None and not stored.is_expired(self.records.now())

    def _model(self, model_id: str) -> Model:
        model = self.records.find(Model, model_id)
        if model is None:
            raise NotFound(f"model {model_id!r} does not exist")
        return model


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder to write into. Raises Unavailable for a full disk: it passes, like a store that is away, and says
    nothing about the model."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            yield Path(temporary)
    except OSError as error:
        raise Unavailable(f"the weights cannot be written: {error.strerror or error}") from error


def encrypt(folder: Path, recipients: Iterable[str]) -> None:
    """Encrypts every file of `folder` to `<name>.age`, which each of `recipients` (public keys, checked before) can
    read.

    Raises OSError when the disk is full, which pyrage's own `encrypt_file` would not notice.
    """
    keys = [age_recipient(recipient) for recipient in recipients]
    for source in sorted(folder.iterdir()):
        with source.open("rb") as data, source.with_name(source.name + ENCRYPTED).open("wb") as target:
            pyrage.encrypt_io(data, target, keys)
        source.unlink()
