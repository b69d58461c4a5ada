"""The action of `tinsmith import`: makes a checkpoint of a folder with a PEFT adapter or with a model's weights."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from app import ids
from app.commands.connection import account_service, open_store, reached, settings_of
from app.domain.accounts import Project
from app.domain.adapters import CONFIG_FILE, FILES, TENSORS_FILE
from app.domain.ops import LoraSpec
from app.errors import BadRequest, NotFound, RequestError, SetupError, Unavailable
from app.services.base_models import BaseModels, trainer_role
from app.services.imports import full_weights, peft_files
from app.services.imports.importer import Importer, path_of
from app.services.tenants.authentication import project_of
from app.services.tenants.limits import LimitsFinder, QuotaService
from app.services.tenants.spending import Spending
from app.services.validation import check_lora
from app.settings import Settings
from app.stack.config import Options
from app.stack.terminal import show
from app.stores.objects.base import ObjectStore
from app.stores.redis.client import connect
from app.stores.redis.journal import RedisOpLog
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.limits import RedisQuotas
from app.stores.redis.pages import RedisPages
from app.stores.redis.records import RedisRecords


def import_folder(options: Options, folder: Path, base_model: str, project: str | None) -> int:
    """Imports the folder and prints the checkpoint's path. Raises SetupError when that cannot be done as asked,
    Unavailable when a store is away or no trainer of the base model is up."""
    settings = settings_of(options)
    objects = open_store(settings)
    try:
        with reached(settings):
            owner = _project(settings, objects, project)
            show(_Import(settings, objects, owner, base_model)(folder))
    except Unavailable:
        raise
    except (RequestError, OSError) as error:
        raise SetupError(f"{folder} is not imported: {error}") from None
    return 0


def _project(settings: Settings, objects: ObjectStore, asked: str | None) -> str:
    """The project that will own the checkpoint: the one that was named, or the only one."""
    accounts = [found.id for found in account_service(settings, objects).all(Project)]
    projects = [*map(project_of, settings.api_keys), *accounts]
    if asked is None and len(projects) != 1:
        raise BadRequest(f"choose one of {len(projects)} projects with --project: {', '.join(projects)}")
    if asked is not None and asked not in projects:
        raise NotFound(f"there is no project {asked!r}; the projects are {', '.join(projects)}")
    return asked or projects[0]


class _Import:
    """Imports folders for one project and base model."""

    def __init__(self, settings: Settings, objects: ObjectStore, project: str, base_model: str) -> None:
        client = connect(settings.redis.url)
        records = RedisRecords(client, settings.engine)
        oplog, lifecycle = RedisOpLog(client, settings.engine), RedisLifecycle(client, settings.engine)
        limits = LimitsFinder(records, settings.limits.project)
        spending = Spending(RedisPages(client, settings.engine), settings.prices_of)
        self._quotas = QuotaService(limits, RedisQuotas(client, settings.engine), spending)
        self._importer = Importer(records, oplog, lifecycle, objects, self._quotas)
        self._bases, self._limits = BaseModels(settings, records), settings.limits
        self._project, self._base_model = project, base_model

    def __call__(self, folder: Path) -> str:
        """Imports the folder and returns the checkpoint's path."""
        return self._adapter(folder) if (folder / CONFIG_FILE).is_file() else self._full(folder)

    def _adapter(self, folder: Path) -> str:
        base, shapes = self._bases.settings(self._base_model), self._bases.adapter_shapes(self._base_model)
        if not (folder / TENSORS_FILE).is_file():
            raise BadRequest(f"there is no {TENSORS_FILE}; no other format is read")
        lora = peft_files.read(folder, shapes, self._limits)
        check_lora(lora, base.max_rank, self._bases.info(trainer_role(full=False), base.name))
        with tempfile.TemporaryDirectory(prefix="tinsmith-import-") as temporary:
            config = Path(temporary) / CONFIG_FILE
            config.write_bytes(peft_files.config_of(lora, base.name, shapes))
            files = {name: folder / name for name in FILES} | {CONFIG_FILE: config}
            return self._add(lora, files)

    def _full(self, folder: Path) -> str:
        base = self._bases.settings(self._base_model)
        if not folder.is_dir():
            raise BadRequest("there is no such folder; correct the path")
        if base.full is None:
            raise BadRequest(
                f"it holds no {CONFIG_FILE}, and full fine-tuning of {base.name} is not offered here (base_models.full "
                "in the settings)"
            )
        arch = self._bases.info(trainer_role(full=True), base.name).arch
        files = full_weights.read(folder, arch, self._bases.weight_shapes(base.name), self._limits)
        return self._add(None, files)

    def _add(self, lora: LoraSpec | None, files: Mapping[str, Path]) -> str:
        session_id = ids.new_session_id()
        with self._quotas.releasing(path_of(session_id)):
            return self._importer.add(None, self._project, session_id, self._base_model, lora, files)
