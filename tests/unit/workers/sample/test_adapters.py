"""Adapters are loaded when needed and evicted when unused, and no request lacks its adapter."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis
import torch
from torch import nn

from app.domain.checkpoints import UNHASHED
from app.domain.ops import LoraSpec
from app.domain.records import BaseModelInfo
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import ServerOpError, Unavailable, UserOpError
from app.settings import BaseModelSettings
from app.stores.disk import Disk
from app.stores.objects.folder import FolderStore
from app.stores.redis.records import RedisRecords
from workers.backends.sampling.base import RequestHandle, SamplerBackend
from workers.backends.sampling.transformers.backend import TransformersSampler
from workers.checkpoints import transfer
from workers.checkpoints.shm_transfer import ShmFolder
from workers.models import base_model, lora, peft_files
from workers.process.fair_queue import FairQueue
from workers.sample.adapter_files import AdapterFiles
from workers.sample.adapters import Adapters, AdapterScheduler

MANY = 24
WITHIN_S = 60.0
ABOUT = {"path": "", "generation": "1", "model_id": "m", "owner": "o", "base_model": "b"}


class RecordingBackend:
    """Records the loaded adapters, and that their folders existed."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.here: set[str] = set()

    def load(self, adapter_id: str, folder: Path) -> None:
        assert (folder / "adapter.safetensors").read_bytes() == adapter_id.encode()
        self.loads.append(adapter_id)
        self.here.add(adapter_id)

    def evict(self, adapter_id: str) -> None:
        self.here.remove(adapter_id)

    def open(self) -> BaseModelInfo:
        raise AssertionError("not called")

    def sample(
        self, adapter_id: str | None, request: SampleRequest, handle: RequestHandle | None = None
    ) -> SampleOutput:
        raise AssertionError("not called")

    def healthy(self) -> bool:
        return True

    def close(self) -> None: ...

    def describe(self) -> Mapping[str, Any]:
        return {}


class CountingStore(FolderStore):
    """Counts how often each adapter is fetched."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "secret", "http://x")
        self.fetched: list[str] = []

    def get(self, key: str, target: Path) -> None:
        self.fetched.append(key.partition("/")[0])
        super().get(key, target)


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    store = CountingStore(tmp_path / "objects")
    for name in "abcd":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter.safetensors").write_bytes(name.encode())
        manifest = transfer.describe(folder, **ABOUT, lora=LoraSpec(4), seq=1, epoch=1)
        transfer.upload(store, name, folder, manifest)
    return store


def _write_bytes(folder: Path, name: str) -> None:
    (folder / "adapter.safetensors").write_bytes(name.encode())
    transfer.seal(folder, transfer.describe(folder, **ABOUT, lora=LoraSpec(4), seq=1, epoch=1))


Make = Callable[..., Adapters]


@pytest.fixture
def make(store: CountingStore, client: redis.Redis, tmp_path: Path) -> Make:
    def make(
        backend: SamplerBackend, most: int = 2, at_a_time: int = 2, cache_bytes: int = 2**30, least_free: int = 0
    ) -> Adapters:
        transfers = ShmFolder(tmp_path / "handover", 2**30)
        cache = Disk("the cache", tmp_path / "cache", least_free)
        files = AdapterFiles(store, RedisRecords(client), transfers, cache, cache_bytes, print)
        return Adapters(backend, files, AdapterScheduler(at_a_time, FairQueue()), most, nullcontext)

    return make


def test_the_longest_unused_adapter_makes_room_and_comes_back_from_the_disk(make: Make, store: CountingStore):
    backend = RecordingBackend()
    adapters = make(backend)
    for prefix in ("a", "b", "a", "c"):
        with adapters.use(prefix, "me", RequestHandle()) as adapter_id:
            assert adapter_id in backend.here
    assert backend.here == {"a", "c"}
    with adapters.use("b", "me", RequestHandle()):
        assert "b" in backend.here
    assert backend.loads == ["a", "b", "c", "b"]
    assert store.fetched == ["a", "b", "c"], "it was still on the disk"


def test_files_on_the_disk_are_bounded_and_come_back_from_the_store(make: Make, store: CountingStore, tmp_path: Path):
    backend = RecordingBackend()
    adapters = make(backend, most=1, cache_bytes=0)
    for prefix in ("a", "b"):
        with adapters.use(prefix, "me", RequestHandle()):
            pass
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")] == ["b"], (
        "what is loaded keeps its files, and nothing else does"
    )
    with adapters.use("a", "me", RequestHandle()):
        assert "a" in backend.here
    assert store.fetched == ["a", "b", "a"]


def test_files_that_cannot_be_removed_now_fail_no_request_and_go_later(make: Make, tmp_path: Path):
    adapters = make(RecordingBackend(), most=1, cache_bytes=0)
    locks, away = tmp_path / "cache" / ".locks", tmp_path / "away"
    with adapters.use("b", "me", RequestHandle()), adapters.use("a", "me", RequestHandle()):
        locks.rename(away)
        locks.write_bytes(b"")  # no lock can be taken
    assert (tmp_path / "cache" / "a").is_dir()
    locks.unlink()
    away.rename(locks)
    with adapters.use("b", "me", RequestHandle()):
        pass
    assert not (tmp_path / "cache" / "a").exists()


@pytest.mark.parametrize("nearby", [False, True], ids=["downloaded", "from shared memory"])
def test_a_nearly_full_disk_gets_room_from_files_that_are_not_in_use_and_takes_no_more(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nearby: bool
):
    cache = tmp_path / "cache"

    def files() -> list[str]:
        return sorted(path.name for path in cache.iterdir() if not path.name.startswith("."))

    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=8 - len(files()), total=2**40))
    adapters = make(RecordingBackend(), most=1, least_free=5)  # an adapter has one byte: there is room for three
    for prefix in "abcab":
        with adapters.use(prefix, "me", RequestHandle()):
            pass
    if nearby:
        ShmFolder(tmp_path / "handover", 2**30).write("d", lambda folder: _write_bytes(folder, "d"), 1)
    with adapters.use("d", "me", RequestHandle()):
        assert files() == ["a", "b", "d"], "the one that was unused for longest makes room"
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5))
        with pytest.raises(Unavailable, match="free_disk_bytes"), adapters.use("c", "me", RequestHandle()):
            pass
        assert files() == ["b", "d"], "the engine has loaded these two"


def test_a_download_that_has_the_lock_of_unused_files_delays_no_request(make: Make, tmp_path: Path):
    """One in 256 adapters has the lock of another. The lock of "a" stands for such a download."""
    adapters = make(RecordingBackend(), most=1, cache_bytes=0)
    cache = tmp_path / "cache"

    def use(*prefixes: str) -> None:
        for prefix in prefixes:
            with adapters.use(prefix, "me", RequestHandle()):
                pass

    use("a")
    with transfer._lock(cache, "a"):
        requests = threading.Thread(target=use, args=("b", "c"), daemon=True)
        requests.start()
        requests.join(WITHIN_S)
        assert not requests.is_alive(), "a request waits for the download"
        assert (cache / "a").is_dir() and not (cache / "b").exists()
    use("b")
    assert [path.name for path in cache.iterdir() if not path.name.startswith(".")] == ["b"]


def test_an_adapter_in_use_is_never_evicted(make: Make):
    backend = RecordingBackend()
    adapters = make(backend, most=1, at_a_time=3)
    with adapters.use("a", "me", RequestHandle()):
        with adapters.use("b", "me", RequestHandle()), adapters.use("c", "me", RequestHandle()):
            assert backend.here == {"a", "b", "c"}
        assert backend.here == {"a"}


def test_concurrent_requests_load_an_adapter_once(make: Make):
    backend = RecordingBackend()
    adapters = make(backend)
    together = threading.Barrier(8)

    def request() -> None:
        together.wait()
        with adapters.use("a", "me", RequestHandle()):
            pass

    threads = [threading.Thread(target=request) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert backend.loads == ["a"]


def test_the_base_needs_no_adapter_and_a_vanished_one_is_an_error(make: Make):
    adapters = make(RecordingBackend())
    with adapters.use("", "me", RequestHandle()) as adapter_id:
        assert adapter_id is None
    with pytest.raises(ServerOpError, match="gone"), adapters.use("nowhere", "me", RequestHandle()):
        pass


def test_an_adapter_the_engine_refuses_delays_no_other_request(make: Make):
    class Choosy(RecordingBackend):
        def load(self, adapter_id: str, folder: Path) -> None:
            if adapter_id == "a":
                raise UserOpError("it does not fit")
            super().load(adapter_id, folder)

    adapters = make(Choosy(), at_a_time=1)
    with pytest.raises(UserOpError), adapters.use("a", "me", RequestHandle()):
        pass
    with adapters.use("b", "me", RequestHandle()) as adapter_id:
        assert adapter_id == "b"


@pytest.fixture(scope="module")
def sampler(base: BaseModelSettings) -> Iterator[TransformersSampler]:
    sampler = TransformersSampler(base)
    sampler.open()
    yield sampler
    sampler.close()


def _write_adapter(model: nn.Module, seed: int, folder: Path) -> None:
    """Writes an adapter whose texts differ from those of any other."""
    adapter = lora.new_adapter(model, LoraSpec(rank=4, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    for pair in adapter.pairs.values():
        pair.b.data = torch.randn(pair.b.shape, generator=generator)
    folder.mkdir()
    peft_files.write(adapter, folder, "base")


def test_a_storm_of_more_adapters_than_fit_gives_each_request_its_own_text(
    base: BaseModelSettings, sampler: TransformersSampler, client: redis.Redis, tmp_path: Path
):
    """24 adapters for an engine that runs 2 and keeps 4, on a disk that keeps only the adapters in use."""
    store = FolderStore(tmp_path / "objects", "secret", "http://x")
    prefixes = [f"storm-{number:02}" for number in range(MANY)]
    request = SampleRequest(np.array([5, 6, 7], np.int32), 1, 6, seed=1, temperature=0.0, ignore_eos=True)
    model, alone = base_model.load(base).model, {}
    for number, prefix in enumerate(prefixes):
        folder = tmp_path / prefix
        _write_adapter(model, number, folder)
        manifest = transfer.describe(folder, **ABOUT, lora=LoraSpec(4), seq=1, epoch=1)
        transfer.upload(store, prefix, folder, manifest)
        sampler.load(prefix, folder)
        alone[prefix] = sampler.sample(prefix, request).sequences[0].tokens.tolist()
        sampler.evict(prefix)
    assert len({tuple(tokens) for tokens in alone.values()}) == MANY
    transfers = ShmFolder(tmp_path / "handover", 2**30)
    cache = Disk("the cache", tmp_path / "cache", 0)
    files = AdapterFiles(store, RedisRecords(client), transfers, cache, 0, print)
    adapters = Adapters(sampler, files, AdapterScheduler(2, FairQueue()), 4, nullcontext)
    most = 0

    def one(prefix: str) -> bool:
        nonlocal most
        with adapters.use(prefix, "me", RequestHandle()) as adapter_id:
            most = max(most, len(sampler.describe()["adapters"]))
            return sampler.sample(adapter_id, request).sequences[0].tokens.tolist() == alone[prefix]

    with ThreadPoolExecutor(3 * MANY) as pool:
        assert all(pool.map(one, 3 * prefixes))
    assert most <= 6, "4 that are kept, and for a moment the 2 that come in"


VERSION = "models/session:train:0/sampler_weights/ephemeral-3/3-1"


class OneAtATime(RecordingBackend):
    """Fully fine-tuned models: each replaces the one before."""

    def load(self, adapter_id: str, folder: Path) -> None:
        self.here.clear()
        self.folder = folder
        super().load(adapter_id, folder)

    def evict(self, adapter_id: str) -> None:
        self.here.discard(adapter_id)


def test_full_models_take_turns_and_none_is_swapped_while_it_is_used(make: Make):
    backend = OneAtATime()
    models = make(backend, most=1, at_a_time=1)

    def use(i: int) -> None:
        with models.use("abc"[i % 3], "me", RequestHandle()) as wanted:
            for _ in range(3):
                assert backend.here == {wanted}
                time.sleep(0.001)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(use, range(120)))
    assert len(backend.loads) < 120, "those that came together share a turn"
    last = backend.loads[-1]
    with models.use(last, "me", RequestHandle()):
        assert backend.here == {last}


@pytest.fixture
def transfers(tmp_path: Path) -> ShmFolder:
    """Shared memory with the weights of VERSION."""

    def fill(folder: Path) -> None:
        (folder / "adapter.safetensors").write_bytes(VERSION.encode())
        transfer.seal(folder, transfer.describe(folder, **ABOUT, lora=None, seq=3, epoch=1, hashed=False), UNHASHED)

    folder = ShmFolder(tmp_path / "handover", 2**30)
    assert folder.write(VERSION, fill)
    return folder


@pytest.fixture
def in_place(store: CountingStore, client: redis.Redis, transfers: ShmFolder, tmp_path: Path) -> AdapterFiles:
    cache = Disk("the cache", tmp_path / "cache", 0)
    return AdapterFiles(store, RedisRecords(client), transfers, cache, 2**30, print, in_place=True)


def one_model(backend: SamplerBackend, files: AdapterFiles) -> Adapters:
    return Adapters(backend, files, AdapterScheduler(1, FairQueue()), 1, nullcontext)


def test_all_weights_of_a_model_are_read_where_the_trainer_wrote_them(
    store: CountingStore, transfers: ShmFolder, in_place: AdapterFiles, tmp_path: Path
):
    """A copy of an 8B model would take seconds. Its files stay there as long as the engine holds the model."""
    backend = OneAtATime()
    models = one_model(backend, in_place)
    with models.use(VERSION, "me", RequestHandle()), models.use(VERSION, "me", RequestHandle()):
        pass
    assert backend.folder == transfers.find(VERSION)
    assert not (tmp_path / "cache").exists()
    transfers.remove(VERSION)
    with models.use(VERSION, "me", RequestHandle()):
        assert transfers.find(VERSION) is not None, "a loaded model keeps its files"
    with models.use("a", "me", RequestHandle()):
        assert store.fetched == ["a"], "what is not in shared memory comes from the store"
        transfers.remove(VERSION)
        assert transfers.find(VERSION) is None, "the next model's first sample need not end before"


def test_a_model_that_cannot_be_loaded_keeps_no_files(transfers: ShmFolder, in_place: AdapterFiles):
    class Refusing(OneAtATime):
        def load(self, adapter_id: str, folder: Path) -> None:
            raise UserOpError("it does not fit")

    models = one_model(Refusing(), in_place)
    with pytest.raises(UserOpError), models.use(VERSION, "me", RequestHandle()):
        pass
    transfers.remove(VERSION)
    assert transfers.find(VERSION) is None
