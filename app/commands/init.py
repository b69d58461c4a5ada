"""`tinsmith init`: writes a config file for this machine."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path

from app.demo import model as bundled
from app.errors import SetupError
from app.settings import BaseModelSettings
from app.settings.template import template
from app.stack import checks, hardware
from app.stack.data_folder import write_private
from app.stack.terminal import show, wrapped

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
    found = hardware.find()
    layout = hardware.layout(found, _weights(source))
    base = _base_model(source)
    reasons = [f"The base model is {base['name'] if base else f'{bundled.NAME}, the bundled one'}.", *layout.reasons]
    values = {**base, "trainer": layout.trainer, "sampler": layout.sampler} if base else {}
    try:
        write_private(file, template(values, [*_ABOUT, *found.lines(), *reasons]))
    except OSError as error:
        raise SetupError(f"cannot write {file}: {error.strerror}; name another file") from None
    start = f"tinsmith up --config {shlex.quote(str(file))}"
    if as_json:
        told = {"file": str(file), "hardware": asdict(found), "base_model": values or None, "reasons": reasons}
        show(*json.dumps({**told, "start": start}, indent=2).splitlines())
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


def _weights(source: str | None) -> int:
    """Bytes of a folder's weights; 0 for the bundled model, which is small, and for a hub id."""
    files = Path(source).expanduser().glob("*.safetensors") if source is not None else ()
    return sum(file.stat().st_size for file in files)
