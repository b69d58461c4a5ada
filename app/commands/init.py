"""`tinsmith init`: writes a config file for this machine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from app.commands import model_files
from app.demo import model as bundled
from app.errors import SetupError
from app.settings import BaseModelSettings
from app.settings.template import template
from app.stack import checks, hardware
from app.stack.data_folder import write_private
from app.stack.terminal import show, show_json, visible, warn, wrapped

_ABOUT = (
    "Settings of Tinsmith, written by `tinsmith init` for this machine.",
    "Settings that are comments have the values shown: uncomment one to change it.",
)


def init(file: Path, source: str | None, *, force: bool, as_json: bool) -> int:
    """Writes the file and prints what it has. `source`: folder or hub id of the base model; None: the bundled one.

    Raises SetupError when the file exists (unless `force`) or cannot be written, and when there is no such model.
    """
    if file.exists() and not force:
        raise SetupError(f"{file} exists and stays as it is; name another file, or give --force to replace it")
    checks.training(BaseModelSettings(name=bundled.NAME, path=""))
    for line in checks.unused_gpus():
        warn(line)
    found = hardware.find()
    base = _base_model(source)
    weights = model_files.weight_bytes(base["path"]) if base else 0
    # `tinsmith up` runs the bundled model on one GPU, if there is any.
    used = found if base else replace(found, gpus=found.gpus[:1])
    layout = hardware.layout(used, weights)
    reasons = [_about(base, weights), *layout.reasons]
    values = {**base, "trainer": layout.trainer, "sampler": layout.sampler} if base else {}
    try:
        write_private(file, template(values, map(visible, [*_ABOUT, *found.lines(), *reasons])))
    except OSError as error:
        raise SetupError(f"cannot write {file}: {error.strerror}; name another file") from None
    start = f"tinsmith up --config {shlex.quote(str(file))}"
    if as_json:
        report = {"file": str(file), "hardware": asdict(found), "base_model": values or None, "reasons": reasons}
        show_json({**report, "start": start})
    else:
        lines = [*found.lines(), *reasons, f"wrote {file}; start the stack with `{start}`"]
        show(*(part for line in lines for part in wrapped(line, 2)))
    return 0


def _base_model(source: str | None) -> dict[str, str]:
    """Name and path of the base model, as in the file. A folder is served under its own name, a hub id under itself."""
    if source is None:
        return {}
    folder = Path(source).expanduser()
    given = {"name": folder.absolute().name, "path": str(folder.absolute())}
    base = given if folder.is_dir() else {"name": source, "path": source}
    checks.model_path(BaseModelSettings(**base))
    return base


def _about(base: Mapping[str, str], weights: int) -> str:
    if not base:
        return f"The base model is {bundled.NAME}, the bundled one."
    lacking = "" if weights else f" Its weights are not here yet: `tinsmith models add {base['path']}` downloads them."
    return f"The base model is {base['name']}.{lacking}"
