from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.domain.checkpoints import CheckpointPrefix, Manifest
from app.domain.ops import LoraSpec
from app.errors import BadRequest, Fenced, NotFound, ServerOpError, Unavailable
from app.stores.objects.folder import FolderStore
from tests.full_disk import full_disk
from workers.backends.training.base import ADAPTER_CONFIG_FILE, ADAPTER_FILE, OPTIMIZER_FILE
from workers.checkpoints import transfer

MODEL = "3b1f:train:0"
PREFIX = str(CheckpointPrefix(MODEL, "weights", "step-1", 2, 7))
LORA = LoraSpec(rank=8, train_unembed=False, seed=3)
CONTENT = {ADAPTER_FILE: b"a" * 70_000, ADAPTER_CONFIG_FILE: b'{"r": 8}', OPTIMIZER_FILE: b"moments"}


class WatchedStore(FolderStore):
    """A folder store that records its requests, and fails at a chosen key."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "secret", "http://localhost")
        self.puts: list[str] = []
        self.gets: list[str] = []
        self.fail_at = ""

    def put_new(self, key: str, source: Path | bytes) -> bool:
        if self.fail_at and key.endswith(self.fail_at):
            raise Unavailable("down")
        self.puts.append(key)
        return super().put_new(key, source)

    def get(self, key: str, target: Path) -> None:
        self.gets.append(key)
        super().get(key, target)


@pytest.fixture
def store(tmp_path: Path) -> WatchedStore:
    return WatchedStore(tmp_path / "objects")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def folder_of(tmp_path: Path, content: dict[str, bytes] = CONTENT) -> Path:
    folder = tmp_path / "saved"
    folder.mkdir(exist_ok=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


def write(store: FolderStore, folder: Path, prefix: str = PREFIX, seq: int = 7) -> Manifest:
    manifest = transfer.describe(
        folder,
        path=f"tinker://{MODEL}/weights/step-1",
        generation="7-2",
        model_id=MODEL,
        owner="me",
        base_model="tiny",
        lora=LORA,
        seq=seq,
        epoch=2,
        user_metadata={"note": "first"},
    )
    return transfer.upload(store, prefix, folder, manifest)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def visible(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file() and ".locks" not in path.parts]


def test_what_was_written_is_fetched_byte_for_byte(store: WatchedStore, tmp_path: Path, cache: Path):
    written = write(store, folder_of(tmp_path))
    folder = transfer.fetch(store, PREFIX, cache)
    assert contents(folder) == CONTENT
    assert Manifest.from_json((folder / "manifest.json").read_bytes()) == written


def test_the_manifest_says_what_where_and_on_which_machine(store: WatchedStore, tmp_path: Path):
    write(store, folder_of(tmp_path))
    manifest = transfer.read_manifest(store, PREFIX)
    assert (manifest.path, manifest.lora, manifest.seq, manifest.epoch) == (
        f"tinker://{MODEL}/weights/step-1",
        LORA,
        7,
        2,
    )
    assert {name: entry.size for name, entry in manifest.files.items()} == {n: len(d) for n, d in CONTENT.items()}
    assert manifest.has_optimizer
    assert manifest.user_metadata == {"note": "first"}
    assert (manifest.threads, manifest.cpu) == (transfer.host_threads(), transfer.host_cpu())


def test_an_upload_goes_on_without_room_for_the_files_that_are_stored(store: WatchedStore, tmp_path: Path):
    """The disk may be a small one in memory, and the upload is repeated until it ends."""
    folder = folder_of(tmp_path)
    store.put_new(f"{PREFIX}/{ADAPTER_FILE}", folder / ADAPTER_FILE)
    with full_disk(len(CONTENT[ADAPTER_FILE]) - 1):
        write(store, folder)
    assert transfer.is_there(store, PREFIX)


def test_without_an_optimizer_file_the_manifest_says_so(store: WatchedStore, tmp_path: Path):
    assert not write(store, folder_of(tmp_path, {ADAPTER_FILE: b"a"})).has_optimizer


def test_the_manifest_is_written_last(store: WatchedStore, tmp_path: Path):
    write(store, folder_of(tmp_path))
    assert store.puts[-1] == f"{PREFIX}/manifest.json"
    assert sorted(store.puts[:-1]) == sorted(f"{PREFIX}/{name}" for name in CONTENT)


@pytest.mark.parametrize("stopped_at", [*CONTENT, "manifest.json"])
def test_a_write_that_stops_anywhere_leaves_no_checkpoint_and_can_be_repeated(
    store: WatchedStore, tmp_path: Path, cache: Path, stopped_at: str
):
    store.fail_at = stopped_at
    with pytest.raises(Unavailable):
        write(store, folder_of(tmp_path))
    with pytest.raises(NotFound):
        transfer.fetch(store, PREFIX, cache)

    store.fail_at = ""
    write(store, folder_of(tmp_path))
    assert contents(transfer.fetch(store, PREFIX, cache)) == CONTENT


def test_a_repeat_returns_the_manifest_that_is_there_and_uploads_nothing(store: WatchedStore, tmp_path: Path):
    first = write(store, folder_of(tmp_path))
    store.puts.clear()
    again = write(store, folder_of(tmp_path, {ADAPTER_FILE: b"other"}), seq=9)
    assert again == first
    assert store.puts == []


def test_other_bytes_left_by_an_attempt_that_died_do_not_end_up_in_the_checkpoint(
    store: WatchedStore, tmp_path: Path, cache: Path
):
    store.put_new(f"{PREFIX}/{ADAPTER_FILE}", b"left by a dead attempt")
    write(store, folder_of(tmp_path))
    assert contents(transfer.fetch(store, PREFIX, cache)) == CONTENT


def test_a_second_writer_of_the_same_generation_stops(tmp_path: Path):
    class Contested(WatchedStore):
        def delete(self, keys):
            super().delete(keys)
            FolderStore.put_new(self, f"{PREFIX}/{ADAPTER_FILE}", b"the other's")

    store = Contested(tmp_path / "objects")
    store.put_new(f"{PREFIX}/{ADAPTER_FILE}", b"the other's")
    with pytest.raises(Fenced):
        write(store, folder_of(tmp_path))


@pytest.mark.parametrize("damage, error", [(b"b" * 70_000, ServerOpError), (b"a" * 69_999, Unavailable)])
def test_a_damaged_file_never_becomes_visible(
    store: WatchedStore, tmp_path: Path, cache: Path, damage: bytes, error: type[Exception]
):
    write(store, folder_of(tmp_path))
    (tmp_path / "objects" / PREFIX / ADAPTER_FILE).write_bytes(damage)
    with pytest.raises(error, match="adapter_model"):
        transfer.fetch(store, PREFIX, cache)
    assert visible(cache) == []


def test_a_fetch_that_breaks_off_at_the_last_file_shows_nothing(store: WatchedStore, tmp_path: Path, cache: Path):
    class Breaking(WatchedStore):
        def get(self, key: str, target: Path) -> None:
            if key.endswith(OPTIMIZER_FILE):
                raise Unavailable("down")
            super().get(key, target)

    write(store, folder_of(tmp_path))
    with pytest.raises(Unavailable):
        transfer.fetch(Breaking(tmp_path / "objects"), PREFIX, cache)
    assert visible(cache) == []
    assert contents(transfer.fetch(store, PREFIX, cache)) == CONTENT


def test_a_full_disk_puts_a_fetch_off_and_the_next_one_works(store: WatchedStore, tmp_path: Path, cache: Path):
    class Far(WatchedStore):
        def get(self, key: str, target: Path) -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.read(key))

    write(store, folder_of(tmp_path))
    with full_disk(20_000), pytest.raises(Unavailable, match="cannot be kept"):
        transfer.fetch(Far(tmp_path / "objects"), PREFIX, cache)
    assert visible(cache) == []
    assert contents(transfer.fetch(store, PREFIX, cache)) == CONTENT


def test_a_missing_checkpoint_is_not_found_and_leaves_nothing(store: WatchedStore, cache: Path):
    with pytest.raises(NotFound):
        transfer.fetch(store, PREFIX, cache)
    assert visible(cache) == []


@pytest.mark.parametrize("manifest", [b"", b"[]", b"{}", json.dumps({"schema_version": 99}).encode()])
def test_a_manifest_we_cannot_understand_is_a_server_error(store: WatchedStore, manifest: bytes):
    store.put_new(f"{PREFIX}/manifest.json", manifest)
    with pytest.raises(ServerOpError, match="is not valid"):
        transfer.read_manifest(store, PREFIX)


def test_concurrent_fetchers_download_once_and_all_see_it_whole(store: WatchedStore, tmp_path: Path, cache: Path):
    write(store, folder_of(tmp_path))
    barrier = threading.Barrier(8)

    def fetch(_: int) -> dict[str, bytes]:
        barrier.wait()
        return contents(transfer.fetch(store, PREFIX, cache))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(fetch, range(8))) == [CONTENT] * 8
    assert len(store.gets) == len(CONTENT)


def test_a_fetched_checkpoint_needs_the_store_no_more(store: WatchedStore, tmp_path: Path, cache: Path):
    write(store, folder_of(tmp_path))
    transfer.fetch(store, PREFIX, cache)
    store.delete(store.list(""))
    assert contents(transfer.fetch(store, PREFIX, cache)) == CONTENT


def test_a_forgotten_checkpoint_leaves_the_cache_and_can_be_fetched_again(
    store: WatchedStore, tmp_path: Path, cache: Path
):
    write(store, folder_of(tmp_path))
    transfer.fetch(store, PREFIX, cache)
    transfer.forget(PREFIX, cache)
    transfer.forget(PREFIX, cache)
    assert visible(cache) == []
    assert contents(transfer.fetch(store, PREFIX, cache)) == CONTENT


def test_generations_of_one_name_lie_apart():
    later = str(CheckpointPrefix(MODEL, "weights", "step-1", 2, 9))
    assert later != PREFIX
    assert later.rpartition("/")[0] == PREFIX.rpartition("/")[0]


@pytest.mark.parametrize("prefix", ["../elsewhere", "/etc", "models/../.."])
def test_a_prefix_cannot_leave_the_cache(store: WatchedStore, cache: Path, prefix: str):
    with pytest.raises(BadRequest):
        transfer.fetch(store, prefix, cache)
    with pytest.raises(BadRequest):
        transfer.forget(prefix, cache)


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "no manifest", "bad manifest"])
def test_a_local_folder_is_verified_before_it_is_used(tmp_path: Path, damage: str):
    folder = folder_of(tmp_path)
    manifest = transfer.describe(
        folder, path="", generation="7-2", model_id=MODEL, owner="me", base_model="tiny", lora=LORA, seq=7, epoch=2
    )
    transfer.seal(folder, manifest)
    assert transfer.verify(folder) == manifest
    match damage:
        case "changed":
            (folder / ADAPTER_FILE).write_bytes(b"b" * 70_000)
        case "cut":
            (folder / ADAPTER_FILE).write_bytes(b"a" * 69_999)
        case "gone":
            (folder / ADAPTER_FILE).unlink()
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "bad manifest":
            (folder / "manifest.json").write_bytes(b"{")
    with pytest.raises((ServerOpError, FileNotFoundError)):
        transfer.verify(folder)


def test_the_thread_count_is_what_torch_will_use(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert transfer.host_threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert transfer.host_threads() == 2


def test_the_cpu_is_the_one_the_kernel_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text("processor\t: 0\nmodel\t\t: 17\nmodel name\t: Chip: 2 GHz\nprocessor\t: 1\n")
    monkeypatch.setattr(transfer, "_CPU_INFO", cpu_info)
    assert transfer.host_cpu() == "Chip: 2 GHz"
