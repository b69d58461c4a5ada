"""A checkpoint is complete or absent, and never changes, whichever process dies at whichever call to the store."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.domain.checkpoints import MANIFEST, CheckpointPrefix, Manifest
from app.domain.ops import LoraSpec
from app.errors import Fenced, NotFound, ServerOpError, Unavailable
from app.stores.objects.base import ObjectStore, file_entry
from app.stores.objects.folder import FolderStore
from app.stores.objects.notes import remove_checkpoint
from app.stores.objects.s3 import S3Store
from tests.property.faults import Crash, Fault, Faults
from tests.property.runs import run_machine
from tests.servers_s3 import start_s3
from workers.checkpoints import transfer

MODEL = "session:train:0"
FILES = ("adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors")
FAULTS = st.sampled_from([Fault.NONE, *Fault])
CALLS = st.integers(0, 8)
GENERATIONS = st.integers(0, 3)


class CheckpointMachine(RuleBasedStateMachine):
    """Writes generations, each perhaps several times, until one write is complete. `store_in` makes an empty store."""

    folder: Path
    store_in: Callable[[Path], ObjectStore]
    hit: Counter[Fault]

    @initialize()
    def start(self) -> None:
        self.place = Path(tempfile.mkdtemp(dir=self.folder))
        self.store = type(self).store_in(self.place / "objects")
        self.numbers = itertools.count()
        self.committed: dict[int, dict[str, bytes]] = {}
        self.damaged: dict[int, str] = {}
        self.removed: set[int] = set()

    def teardown(self) -> None:
        if not hasattr(self, "place"):
            return
        for generation in (0, 1, 2, 3):
            if generation not in self.removed:
                self.write(generation, "last", Fault.NONE, 0)
                self.a_checkpoint_is_whole_and_never_changes()
                assert generation in self.committed, "a write that was broken off can be repeated"
        shutil.rmtree(self.place)

    @rule(generation=GENERATIONS, content=st.sampled_from("xy"), fault=FAULTS, at=CALLS)
    def write(self, generation: int, content: str, fault: Fault, at: int) -> None:
        """Writes one generation.

        A writer that dies may have got further than it reports. A later write may hold other bytes: a replay is not
        exact.
        """
        if generation in self.removed:
            return
        with self._failing(fault, at, lambda: self._upload(self.store, generation, content)) as store:
            self._upload(store, generation, content)

    @rule(generation=GENERATIONS, other=GENERATIONS, content=st.sampled_from("xy"), at=CALLS)
    def write_two_at_once(self, generation: int, other: int, content: str, at: int) -> None:
        if {generation, other} & self.removed:
            return
        with self._failing(Fault.SLEEPS_BEFORE, at, lambda: self._upload(self.store, other, content)) as store:
            self._upload(store, generation, content)

    @rule(generation=GENERATIONS, fault=FAULTS, at=CALLS)
    def fetch(self, generation: int, fault: Fault, at: int) -> None:
        """The fetch gives complete and correct files, or an error and nothing in the cache."""
        cache = self.place / f"cache-{next(self.numbers)}"
        with self._failing(fault, at, lambda: None) as store:
            try:
                found = transfer.fetch(store, self._prefix(generation), cache)
            except NotFound:
                assert generation not in self.committed or generation in self.damaged
            except ServerOpError:
                assert generation in self.damaged
            else:
                assert generation not in self.damaged
                assert {path.name: path.read_bytes() for path in found.iterdir()} == self.committed[generation]
                transfer.forget(self._prefix(generation), cache)
        assert not (cache / self._prefix(generation)).exists()

    @precondition(lambda self: self.committed)
    @rule(pick=GENERATIONS, name=st.sampled_from(FILES), how=st.sampled_from(["lost", "cut short", "other bytes"]))
    def damage(self, pick: int, name: str, how: str) -> None:
        generation = sorted(self.committed)[pick % len(self.committed)]
        if generation in self.damaged:
            return
        right = self.committed[generation][name]
        self._replace(generation, name, {"lost": None, "cut short": right[:-1], "other bytes": right[::-1]}[how])
        self.damaged[generation] = name

    @precondition(lambda self: self.damaged)
    @rule()
    def repair(self) -> None:
        generation, name = self.damaged.popitem()
        self._replace(generation, name, self.committed[generation][name])

    @rule(generation=GENERATIONS, fault=FAULTS, at=st.integers(0, 2))
    def remove(self, generation: int, fault: Fault, at: int) -> None:
        """An interrupted removal has removed the manifest or nothing."""
        with self._failing(fault, at, lambda: None) as store:
            remove_checkpoint(store, self._prefix(generation))
        if self._manifest(generation) is None:
            self.committed.pop(generation, None)
            self.damaged.pop(generation, None)
            self.removed.add(generation)

    @invariant()
    def a_checkpoint_is_whole_and_never_changes(self) -> None:
        for generation in range(4):
            data = self._manifest(generation)
            if data is None:
                assert generation not in self.committed
                continue
            assert generation not in self.removed
            found = {MANIFEST: data}
            for name, expected in Manifest.from_json(data).files.items():
                if name == self.damaged.get(generation):
                    found[name] = self.committed[generation][name]
                    continue
                found[name] = self.store.read(f"{self._prefix(generation)}/{name}")
                (self.place / "copy").write_bytes(found[name])
                assert file_entry(self.place / "copy") == expected
            assert sorted(found) == sorted([MANIFEST, *FILES])
            assert found == self.committed.setdefault(generation, found)

    def _upload(self, store: ObjectStore, generation: int, content: str) -> None:
        folder = self.place / f"write-{next(self.numbers)}"
        folder.mkdir()
        for name in FILES:
            (folder / name).write_text(f"{name} {generation} {content}" * 20)
        manifest = transfer.describe(
            folder,
            path="",
            generation=str(generation),
            model_id=MODEL,
            owner="me",
            base_model="base",
            lora=LoraSpec(rank=4),
            seq=generation,
            epoch=1,
        )
        written = transfer.upload(store, self._prefix(generation), folder, manifest)
        assert written.to_json() == self._manifest(generation), "what is there is what counts"

    def _failing(self, fault: Fault, at: int, meanwhile: Callable[[], None]) -> _Failing:
        return _Failing(self.store, self.hit, fault, at, meanwhile)

    def _replace(self, generation: int, name: str, data: bytes | None) -> None:
        key = f"{self._prefix(generation)}/{name}"
        self.store.delete([key])
        if data is not None:
            self.store.put_new(key, data)

    def _prefix(self, generation: int) -> str:
        return str(CheckpointPrefix(MODEL, "weights", "step-1", 1, generation))

    def _manifest(self, generation: int) -> bytes | None:
        try:
            return self.store.read(f"{self._prefix(generation)}/{MANIFEST}")
        except NotFound:
            return None


class _Failing:
    """The store of one process that `fault` hits.

    The fault may end the process, or let it find that another process is writing.
    """

    def __init__(
        self, store: ObjectStore, hit: Counter[Fault], fault: Fault, at: int, meanwhile: Callable[[], None]
    ) -> None:
        faults = Faults(hit)
        faults.plan(fault, at, meanwhile)
        self._store: ObjectStore = faults.proxy("store", store)

    def __enter__(self) -> ObjectStore:
        return self._store

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        return kind is not None and issubclass(kind, (Crash, Unavailable, Fenced))


def in_folder(folder: Path) -> ObjectStore:
    return FolderStore(folder, "secret", "http://x")


@pytest.fixture
def machine(tmp_path: Path) -> CheckpointMachine:
    """A machine to run by hand, as the output of a failing run shows."""
    space = {"folder": tmp_path, "store_in": staticmethod(in_folder), "hit": Counter()}
    machine = type("Checkpoints", (CheckpointMachine,), space)()
    machine.start()
    return machine


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault.name.startswith(("DIES", "LOST"))])
def test_a_write_that_ends_at_any_call_leaves_no_checkpoint_or_a_whole_one_and_can_be_repeated(
    machine: CheckpointMachine, fault: Fault
):
    for generation in range(4):
        for at in range(2 * generation, 2 * generation + 2):
            machine.write(generation, "x", fault, at)
            machine.a_checkpoint_is_whole_and_never_changes()
            machine.write(generation, "y", fault, at)
            machine.a_checkpoint_is_whole_and_never_changes()
    machine.teardown()


@pytest.mark.parametrize("at", range(8))
def test_a_checkpoint_stays_what_it_was_whoever_writes_it_again(machine: CheckpointMachine, at: int):
    machine.write(0, "x", Fault.NONE, 0)
    machine.write(0, "y", Fault.DIES_BEFORE, at)
    machine.a_checkpoint_is_whole_and_never_changes()
    machine.write(0, "y", Fault.NONE, 0)
    machine.a_checkpoint_is_whole_and_never_changes()


@pytest.mark.parametrize("deleted", range(len(FILES) + 2))
def test_a_removal_that_dies_in_the_middle_leaves_no_half_checkpoint(machine: CheckpointMachine, deleted: int):
    machine.write(0, "x", Fault.NONE, 0)
    machine.a_checkpoint_is_whole_and_never_changes()
    whole = machine.store

    class Dying(FolderStore):
        def delete(self, keys: Iterable[str]) -> None:
            whole.delete(list(keys)[:deleted])
            raise Crash

    machine.store = Dying(machine.place / "objects", "secret", "http://x")
    machine.remove(0, Fault.NONE, 0)
    machine.a_checkpoint_is_whole_and_never_changes()
    machine.fetch(0, Fault.NONE, 0)


@pytest.mark.parametrize("how", ["lost", "cut short", "other bytes"])
def test_a_damaged_checkpoint_is_never_returned(machine: CheckpointMachine, how: str):
    machine.write(0, "x", Fault.NONE, 0)
    machine.a_checkpoint_is_whole_and_never_changes()
    for name in FILES:
        machine.damage(0, name, how)
        machine.fetch(0, Fault.NONE, 0)
        machine.repair()
        machine.fetch(0, Fault.NONE, 0)


def run_on(folder: Path, store_in: Callable[[Path], ObjectStore], short: int, dose: int) -> None:
    """Runs until at least `dose` calls have failed; otherwise nothing is proved."""
    hit: Counter[Fault] = Counter()
    space = {"folder": folder, "store_in": staticmethod(store_in), "hit": hit}
    run_machine(type("Checkpoints", (CheckpointMachine,), space), short)
    assert hit.total() >= dose, hit


def test_a_checkpoint_in_a_folder_is_whole_or_not_there(tmp_path: Path):
    run_on(tmp_path, in_folder, short=25, dose=20)


def test_a_checkpoint_on_s3_is_whole_or_not_there(tmp_path: Path):
    with start_s3(tmp_path / "s3") as settings:
        store = S3Store(settings)

        def emptied(folder: Path) -> ObjectStore:
            store.delete(store.list(""))
            return store

        run_on(tmp_path, emptied, short=5, dose=1)
