"""The check that a base model still has the weights that its runs and checkpoints depend on.

The path of a base model may come to name other weights: a hub id names the newest revision, and a folder may be
changed. On other weights every number of a run is silently another one, also in the replay of its journal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from app.errors import UnservableModel
from app.settings import BaseModelSettings
from app.stores.redis.client import is_outage
from app.stores.redis.records import RedisRecords
from workers.models.loading.source import explained, local_path
from workers.models.loading.weights_id import weights_id

log = logging.getLogger(__name__)
_AGAIN_S = 1.0


@contextmanager
def checked(records: RedisRecords, base: BaseModelSettings) -> Iterator[None]:
    """Checks the weights that the block loads, and notes their id if the base model has none yet.

    They are checked once they are loaded: then this machine's cache has those of a hub id, and weights that cannot be
    loaded leave no note. Those of a folder are also checked before, because loading takes minutes.

    Raises UnservableModel when they are not those that the state server has noted for this base model, or not those of
    the setting `weights_id`; that setting replaces the note. Weights without safetensors files are not checked. Waits
    while the state server is away.
    """
    if Path(local_path(base.path)).is_dir():
        _check(records, base, note=False)
    yield
    _check(records, base, note=True)


def _check(records: RedisRecords, base: BaseModelSettings, *, note: bool) -> None:
    with explained(base):
        found = weights_id(base.path)
    if not found and base.weights_id:
        raise UnservableModel(
            f"base model {base.name!r}: weights_id is {base.weights_id}, but the weights of its path are in no "
            "safetensors files, so they have no id: leave weights_id out, or give safetensors files"
        )
    if not found:
        if note:
            log.warning("the weights of base model %s are not checked: they are in no safetensors files", base.name)
        return
    if base.weights_id not in ("", found):
        raise UnservableModel(
            f"base model {base.name!r}: weights_id is {base.weights_id}, but the weights of its path have the id "
            f"{found}: put the weights of that id back, or correct weights_id"
        )
    noted = _noted(records, base, found if note else "")
    if noted not in ("", found) and not base.weights_id:
        raise UnservableModel(_other_weights(base, noted, found))
    if note:
        log.info("the weights of base model %s have the id %s", base.name, found)
        if noted not in ("", found):
            log.warning("base model %s had weights of the id %s before; weights_id replaces it", base.name, noted)


def _noted(records: RedisRecords, base: BaseModelSettings, new: str) -> str:
    """The id that was noted before `new`, which is noted unless it is empty. A worker without a state server has no
    work, so it waits for one."""
    while True:
        try:
            return records.note_weights(base.name, new, replace=bool(base.weights_id))
        except redis.RedisError as error:
            if not is_outage(error):
                raise
            log.warning("could not compare the weights of base model %s yet: %s", base.name, error)
            time.sleep(_AGAIN_S)


def _other_weights(base: BaseModelSettings, noted: str, found: str) -> str:
    return (
        f"base model {base.name!r} was served here with other weights before (id {noted}; those of its path have the "
        f"id {found}), and its runs and checkpoints may depend on them: put the earlier weights back (for a hub id, "
        "set path to a folder with the earlier revision), or serve these under another name; to go on with these "
        f'weights on purpose, set weights_id = "{found}" in the section of the base model'
    )
