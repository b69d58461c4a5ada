"""A chaos run: compares the results of disturbed clients with those of undisturbed ones."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import script
from tests.chaos.compare import differences, distance
from tests.chaos.forms import Form
from tests.chaos.killer import Killer
from tests.chaos.observer import Observer, await_true
from tests.chaos.script import Transcript
from tests.chaos.storm import Storm
from tests.contract.stack import Stack

_SHARED = re.compile(r'"ops_in_pass": (?:[2-9]|\d\d)')
_COMMITTED = re.compile(r'"logger": "tinsmith.ops", "message": "\w+ (?:done|failed)", "request_id": "([^"]+)"')


@dataclass
class Report:
    """Report of a run, for assertions and for the JSON file."""

    seed: int
    dealt: Mapping[str, int] = field(default_factory=dict)
    plays: int = 0
    ops_applied: int = 0
    ownership_changes: int = 0
    refused_commits: int = 0
    shared_ops: int = 0
    """Ops that were committed from a pass with others."""
    distance: float = 0.0
    """The greatest relative difference of anything a client got; see Form.bound."""
    admissions_posted: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    """One line a lost future, a result that differs, or an effect that is missing or doubled; must be empty."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Results of undisturbed clients: each slot's transcript, and the storm's results in order."""

    transcripts: Mapping[int, Transcript]
    storm: list[Any]


class Run:
    """A run with one stack, one seed, one form. Its notes are written beside the stack's data folder."""

    def __init__(self, stack: Stack, seed: int, form: Form) -> None:
        self._stack, self._seed, self._form = stack, seed, form
        self._slots = range(1, form.slots + 1)
        self._observer = Observer(stack)
        self._storm = Storm(stack, seed, form.calls, form.copies)
        self._report = Report(seed)
        self._notes = stack.data_dir.parent / "chaos.log"
        self._started = time.monotonic()
        self._lock = threading.Lock()

    def reference(self) -> Reference:
        """Runs the clients while nothing dies."""
        with ThreadPoolExecutor(len(self._slots)) as pool:
            transcripts = dict(zip(self._slots, pool.map(self._play, self._slots), strict=True))
        return Reference(transcripts, self._storm.in_order() if self._form.calls else [])

    def disturbed(self, expected: Reference) -> Report:
        """Runs clients repeatedly beside a storm of calls, while the killer injects the form's faults."""
        started, before, posted = time.monotonic(), self._observer.heads(), self._storm.posted
        killer = Killer(self._stack, self._observer, self._seed, self._form.dose, self._form.changes, self._note)
        over = threading.Event()
        with ThreadPoolExecutor(len(self._slots) + 2) as pool:
            clients = [pool.submit(self._play_on, slot, expected.transcripts[slot], over) for slot in self._slots]
            if self._form.calls:
                clients.append(pool.submit(self._run_storm, expected.storm, killer))
            try:
                self._noting("killer", killer.run)
            finally:
                killer.done = 1.0
                over.set()
            for client in clients:
                client.result()
        self._noting("end", lambda: await_true("every Op terminal", lambda: not self._observer.waiting()))
        after = self._observer.heads()
        self._report.dealt, self._report.seconds = dict(killer.dealt), round(time.monotonic() - started, 1)
        self._report.ops_applied = after.applied - before.applied
        self._report.ownership_changes = after.changes - before.changes
        self._report.admissions_posted = self._storm.posted - posted
        self._read_logs()
        return self._report

    def _play(self, slot: int) -> Transcript:
        return script.play(self._stack, slot, self._form.rounds)

    def _play_on(self, slot: int, expected: Transcript, over: threading.Event) -> None:
        while not over.is_set() and self._noting(f"client {slot}", lambda: self._play_once(slot, expected)):
            self._note(f"client {slot} has played")

    def _play_once(self, slot: int, expected: Transcript) -> None:
        found = self._play(slot)
        if different := differences(expected, found, self._form.bound):
            raise AssertionError(f"not what the undisturbed run got: {different}")
        with self._lock:
            self._report.plays += 1
            self._report.distance = max(self._report.distance, distance(expected, found))

    def _run_storm(self, expected: list[Any], killer: Killer) -> None:
        def post_all() -> None:
            found = self._storm.shuffled(lambda: killer.done)
            old, new = ({str(seq): one for seq, one in enumerate(results, 1)} for results in (expected, found))
            different = differences(old, new, self._form.bound)
            if different or self._storm.faults:
                raise AssertionError(f"results by seq, expected and found: {different}; {self._storm.faults}")

        self._noting("storm", post_all)

    def _noting(self, who: str, what: Callable[[], object]) -> bool:
        """Runs `what`. Returns False when it failed, which is a fault of the run."""
        try:
            what()
        except Exception as error:
            self._fault(f"{who}: {type(error).__name__}: {error}")
            return False
        return True

    def _fault(self, line: str) -> None:
        self._note(f"FAULT {line}")
        self._report.faults.append(line)

    def _note(self, line: str) -> None:
        with self._lock, self._notes.open("a") as notes:
            notes.write(f"{time.strftime('%H:%M:%S')} {time.monotonic() - self._started:8.2f} {line}\n")

    def _read_logs(self) -> None:
        """Reads the commits from the logs.

        A commit is logged after it happens, so a killed worker's last one may be missing. No commit may appear twice.
        """
        lines = [line for log in self._logs() for line in log.read_text(errors="replace").splitlines()]
        self._report.refused_commits = sum(self._observer.refused_commits(log.stem) for log in self._logs())
        self._report.shared_ops = sum(bool(_SHARED.search(line)) for line in lines)
        committed = Counter(match[1] for line in lines if (match := _COMMITTED.search(line)))
        for request_id, count in committed.items():
            if count > 1:
                self._fault(f"{request_id} was committed {count} times")

    def _logs(self) -> list[Path]:
        return sorted((self._stack.data_dir / "logs").glob("trainer-*.log"))
