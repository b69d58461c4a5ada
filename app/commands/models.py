"""`tinsmith models`: lists base models, and downloads them from the Hugging Face hub into its cache.

Workers find a model in the cache by its hub id.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from app.commands import model_files
from app.commands.connection import planned
from app.commands.model_files import NOT_READ, READ
from app.demo import model as bundled
from app.errors import SetupError
from app.services.base_models import lora_coverage
from app.settings import BaseModelSettings
from app.stack import checks
from app.stack.child import environment
from app.stack.config import Options
from app.stack.memory import gib
from app.stack.terminal import show, show_json, visible, wrapped

_CAUSE_CHARACTERS = 200
_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A base model. `state`: served, in the settings, or downloaded. `weight_bytes` is 0 where its files are not here
    yet."""

    name: str
    state: str
    weight_bytes: int
    source: str


def show_models(options: Options, *, as_json: bool) -> int:
    """Prints the base models of the settings or of the running stack, and those in the hub's cache."""
    found = list(_models(options))
    if as_json:
        show_json([asdict(one) for one in found])
        return 0
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for header in ("base model", "state", "weights", "source"):
        table.add_column(header, overflow="fold", no_wrap=header != "source")
    for one in found:
        size = gib(one.weight_bytes) if one.weight_bytes else "-"
        table.add_row(*(Text(visible(cell)) for cell in (one.name, one.state, size, one.source)))
    Console(highlight=False).print(table)
    return 0


def _models(options: Options) -> Iterator[ListedModel]:
    given, running = planned(options)
    own = bundled.folder(given.data_dir.expanduser() / "models")
    bases = (running or given).base_models or (BaseModelSettings(name=bundled.NAME, path=str(own)),)
    for base in bases:
        state, source = "served" if running else "in the settings", "bundled" if base.path == str(own) else base.path
        yield ListedModel(base.name, state, model_files.weight_bytes(base.path), source)
    for hub_id in sorted(model_files.downloaded() - {base.path for base in bases}):
        yield ListedModel(hub_id, "downloaded", model_files.weight_bytes(hub_id), hub_id)


def add_model(hub_id: str, *, as_json: bool) -> int:
    """Downloads a model and prints the weights that LoRA covers and the lines for the config file.

    Raises SetupError before any weights are fetched when the hub does not give the model, when LoRA cannot train it, or
    when the cache cannot be written or has too little room.
    """
    base = BaseModelSettings(name=hub_id, path=hub_id)
    checks.model_path(base)
    if Path(hub_id).expanduser().is_dir():
        raise SetupError(
            f"{hub_id} is a local folder, so there is nothing to download; `tinsmith init --model {hub_id}` writes a "
            "config file that serves it"
        )
    checks.training(base)
    missing = _missing(hub_id)
    about = _report(hub_id)
    context = f"{about['max_context']} tokens of context"
    lines = [f"{about['architecture']}, {_count(about['parameters'])} parameters, {context}", lora_coverage(about)]
    lines.append(f"to download: {gib(sum(missing.values()))}" if missing else "all files are here")
    if not as_json:
        show(*(part for line in lines for part in wrapped(line, 2)))
    folder = _download(hub_id, sum(missing.values()))
    model_files.check(folder)
    config = "[[base_models]]\n" + tomli_w.dumps({"name": hub_id, "path": hub_id}).strip()
    if as_json:
        facts = {"weight_bytes": model_files.weight_bytes(hub_id), "folder": str(folder), "config": config}
        show_json({"name": hub_id, **about, **facts})
    else:
        show(*wrapped(f"the files are in {folder}", 2))
        show(*wrapped(f"write a config file with `tinsmith init --model {hub_id}`, or add to yours:", 2))
        show("", *config.splitlines())
    return 0


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"


def _missing(hub_id: str) -> dict[str, int]:
    """The bytes of each file that is not here yet. Raises SetupError when there are no weights that can be read, or the
    cache cannot be written or has no room for them."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if not model_files.weight_bytes(hub_id):
        model_files.check_cache(hub_id)
    files = _asked(hub_id, dry_run=True)
    if not any(file.filename.endswith(".safetensors") for file in files):
        raise SetupError(f"{hub_id} has no safetensors files on the Hugging Face hub; other formats are not read")
    missing = {file.filename: file.file_size or 0 for file in files if file.will_download}
    cache = Path(HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    needed, free = sum(missing.values()), shutil.disk_usage(cache).free
    if needed > free:
        raise SetupError(
            f"{hub_id} has {gib(needed)} to download, but {cache} has {gib(free)} free; delete something there, or set "
            f"{model_files.cache_variable()} to a folder on another disk"
        )
    return missing


def _download(hub_id: str, size: int) -> Path:
    """Downloads what is missing, `size` bytes. A terminal shows the progress."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    blobs = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=hub_id, repo_type="model") / "blobs"
    console = Console(stderr=True)
    with drawn_progress(console, blobs, size) if console.is_terminal else nullcontext():
        return Path(_asked(hub_id, dry_run=False))


@contextmanager
def drawn_progress(console: Console, folder: Path, size: int) -> Iterator[None]:
    """Draws how much of `size` bytes is in the folder. The library draws three bars, and leaves the cursor on one."""
    before = _bytes(file for file in folder.glob("*") if file.suffix != ".incomplete")
    over = threading.Event()
    parts = (BarColumn(), TaskProgressColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*parts, console=console) as progress:
        task = progress.add_task("", total=size)

        def follow() -> None:
            while not over.wait(_EVERY_S):
                progress.update(task, completed=_bytes(folder.glob("*")) - before)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
            progress.update(task, completed=size)
        finally:
            over.set()
            thread.join()


def _bytes(files: Iterable[Path]) -> int:
    """The size of all files; one may be renamed meanwhile."""
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def _asked(hub_id: str, *, dry_run: bool) -> Any:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        return snapshot_download(hub_id, allow_patterns=[*READ], ignore_patterns=[*NOT_READ], dry_run=dry_run)
    except Exception as error:  # the library lets those of its HTTP client through
        raise SetupError(_refusal(hub_id, error)) from None


def _refusal(hub_id: str, error: BaseException) -> str:
    """The sentence for a download that failed."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    chain = list(_chain(error))
    kinds = {kind for each in chain for kind in type(each).__mro__}
    if GatedRepoError in kinds:
        return f"{hub_id} is gated: ask for access on the Hugging Face hub, and set HF_TOKEN to a token that has it"
    if RepositoryNotFoundError in kinds:
        return f"the Hugging Face hub has no model {hub_id}, or it is private and HF_TOKEN may not read it"
    if OfflineModeIsEnabled in kinds:
        return f"HF_HUB_OFFLINE is set: unset it to download {hub_id}"
    text = " ".join(str(chain[-1]).split())[:_CAUSE_CHARACTERS] or type(chain[-1]).__name__
    return f"cannot download {hub_id}: {text}; run the command again to go on"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _report(hub_id: str) -> dict[str, Any]:
    """Returns the report of `workers.models.report`, run by itself: this process does not import torch."""
    command = [sys.executable, "-m", "workers.models.report", hub_id]
    child = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(os.environ))
    if child.returncode:
        raise SetupError((child.stderr.strip().splitlines() or [f"its check ended with code {child.returncode}"])[-1])
    report: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return report
