"""Fixture of an upgrade: the data folder of another commit's stack that was killed, and its clients' calls.

One archive holds `data/`, without logs and secrets, `base/`, because a random model differs between kinds of
processors, and `asked.json`.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.stack import Stack
from tests.servers import free_port
from tests.upgrade.calls import Call

FIXTURES = Path(__file__).parent / "fixtures"
# Thirty years: temporary data stays alive however old the fixture is.
LONG_S = 10**9
# Snapshots after the first of a model come later than a fixture takes to make; a call of 100 kB goes to the
# object store; a shared-memory transfer lies in the data folder, because shared memory is not in the fixture.
_ENGINE = """
[engine]
lease_s = 3.0
ring_again_s = 1.0
snapshot_share = 1e-7
spill_bytes = 100000
handover_dir = "{handover}"
"""
_KEEP = ("session_s", "retain_s", "orphan_s", "gap_s", "result_unread_s", "result_read_s")
# One sequence at a time: in a batch, the last bits of its logprobs would depend on the other sequences.
_SAMPLER = 'backend = "transformers"\nmax_batch = 1'
_LEFT_OUT = ("data/logs", "data/run", "data/valkey-password", "data/handover", "data/models", "data/cache")


@dataclass(frozen=True, slots=True)
class Run:
    """A model that continues.

    `kept` is a checkpoint of the state after its call `since`; both are empty if the model was not made yet.
    """

    model_id: str
    kept: str
    since: int


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests and answers of the clients.

    `listed` is the API's answers before the end, by path; `key` is one that `tinsmith admin` made.
    """

    commit: str
    calls: list[Call]
    runs: Mapping[str, Run]
    listed: Mapping[str, Any]
    key: str
    stopped_in: str
    """The request that a trainer was running when it was stopped."""

    @property
    def waiting(self) -> list[Call]:
        return [call for call in self.calls if call.result is None]

    @property
    def answered(self) -> list[Call]:
        return [call for call in self.calls if call.result is not None]

    def behind(self, run: Run) -> list[Call]:
        """Calls of the run after its kept checkpoint, in order."""
        calls = [call for call in self.calls if call.model_id == run.model_id and call.seq > run.since]
        return sorted(calls, key=lambda call: call.seq)


def stack(folder: Path, tree: Path | None = None) -> Stack:
    """A stack on `folder`/data with the base model in `folder`/base, of the code in `tree` if it is not this one's."""
    engine = _ENGINE.format(handover=folder / "data" / "handover") + "".join(f"{name} = {LONG_S}\n" for name in _KEEP)
    trainer, program = 'backend = "torch"', "app.cli" if tree else "tests.warm_workers"
    return Stack(
        folder / "data",
        folder / "base",
        free_port(),
        trainer,
        _SAMPLER,
        engine,
        program,
        threads=1,
        full=trainer,
        tree=tree,
    )


def write(folder: Path, asked: Asked) -> None:
    """Writes itself beside `data` and `base`."""
    runs = {name: {"model_id": run.model_id, "kept": run.kept, "since": run.since} for name, run in asked.runs.items()}
    stored = {
        "commit": asked.commit,
        "waiting": [f"{call.kind} {call.request_id}" for call in asked.waiting],
        "stopped_in": asked.stopped_in,
        "runs": runs,
        "key": asked.key,
        "listed": asked.listed,
        "calls": [call.dump() for call in asked.calls],
    }
    (folder / "asked.json").write_text(json.dumps(stored, indent=1))


def read(folder: Path) -> Asked:
    stored = json.loads((folder / "asked.json").read_text())
    runs = {name: Run(**run) for name, run in stored["runs"].items()}
    calls = [Call.load(call) for call in stored["calls"]]
    return Asked(stored["commit"], calls, runs, stored["listed"], stored["key"], stored["stopped_in"])


def pack(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:xz", preset=9) as files:
        for part in ("asked.json", "base", "data"):
            files.add(folder / part, part, filter=_kept)


def unpack(archive: Path, folder: Path) -> Asked:
    with tarfile.open(archive) as files:
        files.extractall(folder)
    return read(folder)


def _kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if entry.name in _LEFT_OUT:
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
