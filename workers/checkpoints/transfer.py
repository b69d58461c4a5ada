"""Transfers checkpoints between local folders and the object store: manifest last, verified before use.

A checkpoint is the files of one flat folder under `prefix`, and `prefix/manifest.json`. Without a manifest it does not
exist; with one it never changes.

An object that arrives truncated is requested again; an object that is wrong twice is damaged.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from app.domain.checkpoints import (
    MANIFEST,
    SCHEMA_VERSION,
    UNHASHED,
    WINDOW,
    WINDOW_VERSION,
    Expiry,
    FileEntry,
    Manifest,
)
from app.domain.ops import LoraSpec
from app.errors import Fenced, NotFound, ServerOpError, Unavailable
from app.stores.objects.base import ObjectStore, check_key, file_entry
from workers.backends.training.base import OPTIMIZER_FILE

_CPU_INFO = Path("/proc/cpuinfo")
_LOCKS = ".locks"
_FOR_EVER = Expiry()
# A user who can write to the object store must not make a worker unpickle or unpack anything, whatever file a library
# looks for. Text, templates and sentencepiece models belong to a tokenizer, which lies beside full model weights.
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|json|txt|jinja|model)")

_TRIES = 4
_PAUSE_S = 0.1
# A store that takes this long to answer is away for longer; the caller puts the Op off and tries again later.
_WITHIN_S = 10.0


def describe(
    folder: Path,
    *,
    path: str,
    generation: str,
    model_id: str,
    owner: str,
    base_model: str,
    lora: LoraSpec | None,
    seq: int,
    epoch: int,
    user_metadata: Mapping[str, str] | None = None,
    expiry: Expiry = _FOR_EVER,
    critic: bool = False,
    hashed: bool = True,
) -> Manifest:
    """The manifest of the files in `folder`, without their sha256 unless `hashed`; the other arguments are its
    fields."""
    files = {source.name: file_entry(source, hashed=hashed) for source in sorted(folder.iterdir())}
    return Manifest(
        path=path,
        generation=generation,
        model_id=model_id,
        owner=owner,
        base_model=base_model,
        lora=lora,
        seq=seq,
        epoch=epoch,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        files=files,
        threads=host_threads(),
        cpu=host_cpu(),
        has_optimizer=OPTIMIZER_FILE in files,
        user_metadata=dict(user_metadata or {}),
        expires_at=expiry.at,
        expiry_by=expiry.by,
        critic=critic,
        schema_version=WINDOW_VERSION if WINDOW in files else SCHEMA_VERSION,
    )


def upload(store: ObjectStore, prefix: str, folder: Path, manifest: Manifest) -> Manifest:
    """Uploads the files of `folder` and commits them with their manifest.

    A repeat of a committed generation uploads nothing and returns the stored manifest. Raises Fenced when another
    worker is writing the same generation.
    """
    try:
        return read_manifest(store, prefix)
    except NotFound:
        pass
    for name, entry in manifest.files.items():
        _upload(store, f"{prefix}/{name}", folder / name, entry)
    if store.put_new(f"{prefix}/{MANIFEST}", manifest.to_json()):
        return manifest
    return read_manifest(store, prefix)


def complete(store: ObjectStore, prefix: str, folder: Path) -> None:
    """Uploads the sealed checkpoint in `folder`, unless it is there.

    Several owners of a model may do so at once, each with a copy of the same state whose last bits may differ. So
    stored files of this generation stay, and the manifest describes them. That suits a checkpoint with one file of
    tensors.
    """
    if is_there(store, prefix):
        return
    manifest, entries = transferred(folder), {}
    for name in manifest.files:
        key, source = f"{prefix}/{name}", folder / name
        own = file_entry(source)  # first, so that a killed process leaves no file behind for long without its manifest
        entries[name] = own if store.put_new(key, source) else store.entry(key)
    store.put_new(f"{prefix}/{MANIFEST}", replace(manifest, files=entries).to_json())


def is_there(store: ObjectStore, prefix: str) -> bool:
    """True if a checkpoint was committed at the prefix."""
    try:
        read_manifest(store, prefix)
    except NotFound:
        return False
    return True


def read_manifest(store: ObjectStore, prefix: str) -> Manifest:
    """Reads the manifest at `prefix`. Raises NotFound when no checkpoint was committed there, Unavailable; and
    ServerOpError when the manifest cannot be understood in any of several reads."""
    key = f"{prefix}/{MANIFEST}"
    failure: Unavailable | ServerOpError = Unavailable()
    for _ in _tries():
        try:
            return _parse_manifest(store.read(key), key)
        except (Unavailable, ServerOpError) as error:
            failure = error
    raise failure


def seal(folder: Path, manifest: Manifest, name: str = MANIFEST) -> None:
    """Makes a local folder a checkpoint: writes its manifest last."""
    (folder / name).write_bytes(manifest.to_json())


def manifest_in(folder: Path, name: str = MANIFEST) -> Manifest:
    """Reads the manifest in a local folder. Raises ServerOpError when it cannot be understood, OSError when it cannot
    be read."""
    return _parse_manifest((folder / name).read_bytes(), f"in {folder}")


def transferred(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint in shared memory. Raises as `manifest_in` does."""
    hashed = (folder / MANIFEST).exists()  # an earlier version wrote it
    return manifest_in(folder, MANIFEST if hashed else UNHASHED)


def verify(folder: Path) -> Manifest:
    """Verifies a local folder and returns its manifest. Raises ServerOpError when a size or sha256 differs from it,
    OSError."""
    manifest = manifest_in(folder)
    for name, expected in manifest.files.items():
        if file_entry(folder / name) != expected:
            raise ServerOpError(f"{folder / name} is damaged: it does not match its manifest")
    return manifest


CheckRoom = Callable[[int], None]
"""Raises Unavailable when the disk has no room for this number of bytes."""
Nearby = Callable[[str, Path, CheckRoom], bool]
"""(prefix, folder, check_room): creates the folder with a checkpoint's files. Returns False when this machine does not
have the checkpoint."""


def any_size(size: int) -> None:
    """The CheckRoom that accepts every size."""


def fetch(
    store: ObjectStore,
    prefix: str,
    cache_dir: Path,
    nearby: Nearby = lambda prefix, folder, check_room: False,
    check_room: CheckRoom = any_size,
) -> Path:
    """Returns a local folder with the checkpoint's files: taken from `nearby`, or downloaded with the manifest, once
    for each `cache_dir`.

    The folder appears after every downloaded size and sha256 was verified, however many threads and processes ask for
    it. It stays until `forget`, and is not flushed to the disk: the next process empties the cache. Raises NotFound
    when there is no such checkpoint, ServerOpError when the stored files are damaged, and Unavailable when it cannot be
    read now, the local disk is full, or `check_room` refuses its bytes.
    """
    folder = cache_dir / check_key(prefix)
    if folder.is_dir():
        return folder
    try:
        with _lock(cache_dir, prefix):
            if not folder.is_dir():
                _bring(store, prefix, folder, cache_dir, nearby, check_room)
    except OSError as error:
        raise Unavailable(f"{prefix} cannot be kept in {cache_dir}: {error.strerror or error}") from error
    return folder


def forget(prefix: str, cache_dir: Path) -> None:
    """Removes a fetched checkpoint from the cache; a missing one is fine. Nobody may be reading its files. Raises
    BlockingIOError while a fetch has the lock, which another checkpoint's fetch may share, and OSError."""
    with (
        _lock(cache_dir, prefix, fcntl.LOCK_EX | fcntl.LOCK_NB),
        tempfile.TemporaryDirectory(dir=cache_dir, prefix=".gone-") as gone,
    ):
        try:
            (cache_dir / check_key(prefix)).rename(Path(gone) / "files")
        except FileNotFoundError:
            return


def host_threads() -> int:
    """The number of threads torch computes with here: OMP_NUM_THREADS, else the cores this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else len(os.sched_getaffinity(0))


def host_cpu() -> str:
    """The processor's model name; with the thread count it identifies hosts where a replay gives the same bits."""
    for line in _CPU_INFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return os.uname().machine


def _upload(store: ObjectStore, key: str, source: Path, entry: FileEntry) -> None:
    if store.put_new(key, source) or store.entry(key) == entry:
        return
    # An attempt that never wrote its manifest left this file, so no one reads it.
    store.delete([key])
    if not store.put_new(key, source):
        raise Fenced(f"another worker is writing {key}")


def _bring(
    store: ObjectStore, prefix: str, folder: Path, cache_dir: Path, nearby: Nearby, check_room: CheckRoom
) -> None:
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".fetch-") as temporary:
        files = Path(temporary) / "files"
        if not nearby(prefix, files, check_room):
            _download(store, prefix, files, check_room)
        folder.parent.mkdir(parents=True, exist_ok=True)
        files.rename(folder)


def _download(store: ObjectStore, prefix: str, files: Path, check_room: CheckRoom) -> None:
    manifest = read_manifest(store, prefix)
    if strange := [name for name in manifest.files if not _FILE.fullmatch(name)]:
        raise ServerOpError(
            f"the manifest of {prefix} names the file {strange[0][:80]!r}; only safetensors, JSON and "
            "tokenizer files are allowed"
        )
    check_room(manifest.size)
    for name, expected in manifest.files.items():
        fetch_file(store, f"{prefix}/{name}", files / name, expected)
    seal(files, manifest)


@contextmanager
def _lock(cache_dir: Path, prefix: str, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Locks a checkpoint for one thread of one process. Each call opens the file anew, so flock separates threads too.
    One in 256 other checkpoints shares the lock."""
    locks = cache_dir / _LOCKS
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / hashlib.sha256(prefix.encode()).hexdigest()[:2]).open("w") as file:
        fcntl.flock(file, how)
        yield


def fetch_file(store: ObjectStore, key: str, target: Path, expected: FileEntry) -> None:
    """Fetches and verifies one file. Raises NotFound; Unavailable when it does not arrive whole; ServerOpError when it
    is damaged, which means whole, but wrong."""
    failure, wrong = Unavailable(), 0
    for _ in _tries():
        try:
            store.get(key, target)
        except Unavailable as error:
            failure = error
            continue
        found = file_entry(target)
        if found == expected:
            return
        wrong += found.size == expected.size
        if wrong == 2:
            raise ServerOpError(
                f"checkpoint file {key} is damaged: it has sha256 {found.sha256}, not {expected.sha256}; restore it in "
                "the object store or use another checkpoint"
            )
        failure = Unavailable(f"{key}: {found.size} of {expected.size} bytes arrived")
    raise failure


def _parse_manifest(data: bytes, name: str) -> Manifest:
    """Parses a manifest. Raises ServerOpError when it cannot be understood."""
    try:
        return Manifest.from_json(data)
    except ValueError as error:
        raise ServerOpError(f"the manifest {name} is not valid: {error}") from None


def _tries() -> Iterator[None]:
    started = time.monotonic()
    for attempt in range(_TRIES):
        if attempt and time.monotonic() - started > _WITHIN_S:
            return
        time.sleep(_PAUSE_S * attempt)
        yield
