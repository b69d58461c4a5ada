"""Uploads of adapters: a client stores the files by signed URLs, and then finishes the upload.

Uploaded files wait below `uploads/<upload id>/`. Their owner may still change them there, so the checks and the
checkpoint are of a copy. Maintenance deletes an upload and its files when it expires (workers/maintenance/orphans.py).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app import ids
from app.domain.accounts import Caller
from app.domain.adapters import CONFIG_FILE, FILES, TENSORS_FILE
from app.domain.ops import LoraSpec
from app.domain.records import Upload, uploaded
from app.errors import BadRequest, NotFound
from app.services.admission import QuotaService
from app.services.base_models import BaseModels, trainer_role
from app.services.imports import peft_files
from app.services.imports.importer import Importer, path_of
from app.services.tenants.access import check_role, load_owned
from app.services.validation import GROUPS, check_lora
from app.services.views import check_writable, timestamp
from app.settings import LimitSettings
from app.stores.objects.base import ObjectStore
from app.stores.redis.records import RedisRecords, dump, load

URL_SECONDS = 3600
# A transfer that started in time may end later, and a finish may be repeated.
_KEPT_SECONDS = 2 * URL_SECONDS


@dataclass(frozen=True, slots=True)
class UploadService:
    records: RedisRecords
    objects: ObjectStore
    bases: BaseModels
    quotas: QuotaService
    importer: Importer
    limits: LimitSettings

    def start(self, caller: Caller, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Starts an upload, and returns its id and a URL for each file. Raises NotFound (project), Forbidden,
        BadRequest, LimitReached, TooManyRequests or Unavailable."""
        project = self._project(caller, asked["destination_project_id"])
        base, lora = asked["base_model"], LoraSpec(**asked["lora_config"])
        shapes = self.bases.adapter_shapes(base)
        info = self.bases.info(trainer_role(full=False), base)
        check_lora(lora, self.bases.settings(base).max_rank, info)
        sizes = {CONFIG_FILE: peft_files.MOST_CONFIG_BYTES, TENSORS_FILE: peft_files.most_bytes(shapes, lora)}
        most = sum(sizes.values())
        self.quotas.store(caller, project, self._waiting(project) + most)
        upload_id, now = ids.new_session_id(), self.records.now()
        upload = Upload(project, base, asdict(lora), now, most, expires_at=now + _KEPT_SECONDS)
        urls = {
            name: self.objects.presign_put(uploaded(upload_id, name), URL_SECONDS, size) for name, size in sizes.items()
        }
        self.records.put_new(Upload.namespace, upload_id, dump(upload))
        return {"upload_id": upload_id, "urls": urls, "expires": timestamp(time.time() + URL_SECONDS)}

    def finish(self, caller: Caller, upload_id: str) -> str:
        """Checks the files, makes them a checkpoint, and returns its path; a repeat returns the same path. Raises
        NotFound (upload), BadRequest, LimitReached, TooManyRequests or Unavailable."""
        upload = load_owned(self.records, Upload, upload_id, caller)
        if not upload.finished:
            self.quotas.take(caller, upload.owner)
            try:
                self._import(caller, upload_id, upload)
            except BadRequest:
                # The files are gone if the same call, sent twice, was faster elsewhere.
                if not load_owned(self.records, Upload, upload_id, caller).finished:
                    raise
        return str(path_of(upload_id))

    def _import(self, caller: Caller, upload_id: str, upload: Upload) -> None:
        with tempfile.TemporaryDirectory(prefix="tinsmith-upload-") as temporary:
            files = {name: Path(temporary) / name for name in FILES}
            for name, file in files.items():
                self._fetch(uploaded(upload_id, name), upload.most_bytes, file)
            shapes = self.bases.adapter_shapes(upload.base_model)
            found = peft_files.read(Path(temporary), shapes, self.limits)
            _check_asked(found, LoraSpec(**upload.lora), [group for group, paths in shapes.items() if paths])
            files[CONFIG_FILE].write_bytes(peft_files.config_of(found, upload.base_model, shapes))
            self.importer.add(caller, upload.owner, upload_id, upload.base_model, found, files)
        self.records.update(Upload.namespace, upload_id, {"finished": json.dumps(True)})
        self.objects.delete(uploaded(upload_id, name) for name in FILES)

    def _fetch(self, key: str, most: int, target: Path) -> None:
        try:
            size = self.objects.size(key)
            if size > most:
                raise BadRequest(f"{target.name} has {size} bytes; the files of such an adapter have at most {most}")
            self.objects.get(key, target)
        except NotFound:
            raise BadRequest(f"{target.name} was not uploaded: send it to its URL with PUT first") from None

    def _project(self, caller: Caller, asked: str | None) -> str:
        if asked is None:
            check_role(caller, caller.project)
            return caller.project
        return check_writable(caller, asked)

    def _waiting(self, project: str) -> int:
        """The most bytes that the project's unfinished uploads may bring."""
        now = self.records.now()
        uploads = (load(Upload, fields) for _, fields in self.records.list(Upload.namespace))
        return sum(one.most_bytes for one in uploads if one.owner == project and not one.is_over(now))


def _check_asked(found: LoraSpec, asked: LoraSpec, groups: list[str]) -> None:
    """Requires the rank and the groups that were named at the start."""
    for name in ("rank", *(f"train_{group}" for group in GROUPS if group in groups)):
        if getattr(found, name) != getattr(asked, name):
            raise BadRequest(
                f"the adapter has {name} {getattr(found, name)}, but the upload was started with {getattr(asked, name)}"
            )
