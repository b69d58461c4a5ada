"""Uploads of adapters: a client stores the files by signed URLs, and then finishes the upload.

Uploaded files wait below `uploads/<upload id>/`. Their owner may still change them there, so the checks and the
checkpoint are of a copy. Maintenance deletes an upload and its files when it expires (workers/maintenance/orphans.py).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

from app import ids
from app.domain.accounts import Caller
from app.domain.adapters import CONFIG_FILE, FILES, TENSORS_FILE
from app.domain.ops import LoraSpec
from app.domain.records import Upload, uploaded
from app.errors import BadRequest, LimitReached, NotFound, TooLarge, Unavailable
from app.services.base_models import BaseModels, trainer_role
from app.services.imports import peft_files
from app.services.imports.importer import Importer, path_of
from app.services.tenants.access import load_owned, project_to_write
from app.services.tenants.limits import RESERVED_S, QuotaService
from app.services.validation import GROUPS, check_lora
from app.services.views import timestamp
from app.settings import LimitSettings
from app.stores.objects.base import ObjectStore
from app.stores.redis.records import RedisRecords

URL_SECONDS = 3600
# Each finish in a process may hold a copy of an adapter's files on the local disk.
_FINISHES_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class UploadService:
    """Starts and finishes uploads. `finishes` bounds those that this process finishes at once."""

    records: RedisRecords
    objects: ObjectStore
    bases: BaseModels
    quotas: QuotaService
    importer: Importer
    limits: LimitSettings
    finishes: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(_FINISHES_AT_ONCE))

    def start(self, caller: Caller, asked: Mapping[str, Any], key: str | None) -> dict[str, Any]:
        """Starts an upload, and returns its id and a URL for each file. A repeat of the call under the same idempotency
        key returns the same id and costs nothing. Raises NotFound (project), Forbidden, BadRequest, LimitReached,
        TooManyRequests or Unavailable."""
        project = project_to_write(caller, asked["destination_project_id"])
        base, lora = asked["base_model"], LoraSpec(**asked["lora_config"])
        shapes = self.bases.adapter_shapes(base)
        info = self.bases.info(trainer_role(full=False), base)
        check_lora(lora, self.bases.settings(base).max_rank, info)
        sizes = {CONFIG_FILE: peft_files.MOST_CONFIG_BYTES, TENSORS_FILE: peft_files.most_bytes(shapes, lora)}
        most = sum(sizes.values())
        upload_id, now = ids.upload_id(project, caller.key_id, key), self.records.now()
        upload = Upload(project, base, asdict(lora), now, most, expires_at=now + RESERVED_S)
        expires = time.time() + URL_SECONDS  # the URLs stop a moment later
        urls = {
            name: self.objects.presign_put(uploaded(upload_id, name), URL_SECONDS, size) for name, size in sizes.items()
        }
        self.quotas.reserve(caller, project, path_of(upload_id), most, (upload_id, upload))
        return {"upload_id": upload_id, "urls": urls, "expires": timestamp(expires)}

    def finish(self, caller: Caller, upload_id: str) -> str:
        """Checks the files, makes them a checkpoint, and returns its path; a repeat returns the same path. Raises
        NotFound (upload), BadRequest, Forbidden for a viewer, LimitReached, TooManyRequests or Unavailable."""
        upload = load_owned(self.records, Upload, upload_id, caller)
        if not upload.finished:
            self.quotas.take(caller, upload.owner)
            try:
                with self._turn(), _local_disk():
                    self._import(caller, upload_id, upload)
            except (BadRequest, LimitReached):
                # If the same call, sent twice, was faster elsewhere, the files are gone and their room is used.
                if not load_owned(self.records, Upload, upload_id, caller).finished:
                    raise
        return str(path_of(upload_id))

    def _import(self, caller: Caller, upload_id: str, upload: Upload) -> None:
        with tempfile.TemporaryDirectory(prefix="tinsmith-upload-") as temporary:
            files = {name: Path(temporary) / name for name in FILES}
            most = {CONFIG_FILE: peft_files.MOST_CONFIG_BYTES, TENSORS_FILE: upload.most_bytes}
            for name, file in files.items():
                self._fetch(uploaded(upload_id, name), most[name], file)
            shapes = self.bases.adapter_shapes(upload.base_model)
            found = peft_files.read(Path(temporary), shapes, self.limits)
            _check_asked(found, LoraSpec(**upload.lora), [group for group, paths in shapes.items() if paths])
            files[CONFIG_FILE].write_bytes(peft_files.config_of(found, upload.base_model, shapes))
            self.importer.add(caller, upload.owner, upload_id, upload.base_model, found, files)
        self.records.update(Upload.namespace, upload_id, {"finished": json.dumps(True)})
        self.objects.delete(uploaded(upload_id, name) for name in FILES)

    def _fetch(self, key: str, most: int, target: Path) -> None:
        try:
            self.objects.get(key, target, most)
        except TooLarge:
            raise BadRequest(f"{target.name} is too large: for this adapter it may have at most {most} bytes") from None
        except NotFound:
            raise BadRequest(f"{target.name} was not uploaded: send it to its URL with PUT first") from None

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Raises Unavailable while this process finishes as many uploads as it may at once."""
        if not self.finishes.acquire(blocking=False):
            raise Unavailable(f"{_FINISHES_AT_ONCE} uploads are being finished here already; try again soon")
        try:
            yield
        finally:
            self.finishes.release()


@contextmanager
def _local_disk() -> Iterator[None]:
    """Raises Unavailable for a full disk: it passes, like a store that is away, and says nothing about the files."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"the upload cannot be checked on the server's disk: {error.strerror or error}") from error


def _check_asked(found: LoraSpec, asked: LoraSpec, groups: list[str]) -> None:
    """Requires the rank and the groups that were named at the start."""
    for name in ("rank", *(f"train_{group}" for group in GROUPS if group in groups)):
        if getattr(found, name) != getattr(asked, name):
            raise BadRequest(
                f"the adapter has {name} {getattr(found, name)}, but the upload was started with "
                f"{getattr(asked, name)}; start a new upload with the adapter's own values"
            )
