"""Adapters are loaded when they are needed, and only unused ones are evicted."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.domain.base_models import BaseModelInfo
from app.domain.ops import LoraSpec
from app.domain.sampling import SampleOutput, SampleRequest
from app.errors import ServerOpError
from app.stores.objects.folder import FolderStore
from workers import checkpoints
from workers.adapters import Adapters


class RecordingBackend:
    """Notes what is loaded, and that its folder was there."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.here: set[str] = set()

    def load(self, adapter_id: str, folder: Path) -> None:
        assert (folder / "adapter.bin").read_bytes() == adapter_id.encode()
        self.loads.append(adapter_id)
        self.here.add(adapter_id)

    def evict(self, adapter_id: str) -> None:
        self.here.remove(adapter_id)

    def open(self) -> BaseModelInfo:
        raise AssertionError("not called")

    def sample(self, adapter_id: str | None, request: SampleRequest) -> SampleOutput:
        raise AssertionError("not called")

    def healthy(self) -> bool:
        return True

    def close(self) -> None: ...

    def describe(self) -> Mapping[str, Any]:
        return {}


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    store = FolderStore(tmp_path / "objects", "secret", "http://x")
    for name in "abc":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter.bin").write_bytes(name.encode())
        about = {"path": "", "generation": "1", "model_id": "m", "owner": "o", "base_model": "b"}
        manifest = checkpoints.describe(folder, **about, lora=LoraSpec(4), seq=1, epoch=1)
        checkpoints.upload(store, name, folder, manifest)
    return store


def test_the_longest_unused_adapter_makes_room_and_comes_back_when_asked_for(store: FolderStore, tmp_path: Path):
    backend = RecordingBackend()
    adapters = Adapters(backend, store, tmp_path / "cache", most=2)
    for prefix in ("a", "b", "a", "c"):
        with adapters.use(prefix) as adapter_id:
            assert adapter_id in backend.here
    assert backend.here == {"a", "c"}
    assert not (tmp_path / "cache" / "b").exists()
    with adapters.use("b"):
        assert "b" in backend.here
    assert backend.loads == ["a", "b", "c", "b"]


def test_an_adapter_in_use_is_never_evicted(store: FolderStore, tmp_path: Path):
    backend = RecordingBackend()
    adapters = Adapters(backend, store, tmp_path / "cache", most=1)
    with adapters.use("a"):
        with adapters.use("b"), adapters.use("c"):
            assert backend.here == {"a", "b", "c"}
        assert backend.here == {"a"}


def test_concurrent_requests_load_an_adapter_once(store: FolderStore, tmp_path: Path):
    backend = RecordingBackend()
    adapters = Adapters(backend, store, tmp_path / "cache", most=2)
    together = threading.Barrier(8)

    def request() -> None:
        together.wait()
        with adapters.use("a"):
            pass

    threads = [threading.Thread(target=request) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert backend.loads == ["a"]


def test_the_base_needs_no_adapter_and_a_vanished_one_is_an_error(store: FolderStore, tmp_path: Path):
    adapters = Adapters(RecordingBackend(), store, tmp_path / "cache", most=2)
    with adapters.use("") as adapter_id:
        assert adapter_id is None
    with pytest.raises(ServerOpError, match="gone"), adapters.use("nowhere"):
        pass
