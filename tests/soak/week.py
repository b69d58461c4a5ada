"""A week of the state server's clock within minutes, with every fault of chaos.

Tenants train and sample in turn. The clock jumps by two hours at a time, so that leases, results, sessions,
checkpoints, retention and pages of an hour end all the time. Meanwhile processes die as in `make chaos`, and some
clients leave without a word.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import requests

from app.domain.records import Session
from app.stores.redis.records import RedisRecords
from tests.chaos import forms, script
from tests.chaos.compare import differences
from tests.chaos.killer import Killer
from tests.chaos.observer import Observer, await_true
from tests.chaos.patience import patiently
from tests.chaos.script import Transcript
from tests.chaos.stack import TRAINERS
from tests.contract.stack import BASE, Stack
from tests.servers import free_port
from tests.soak.clock import Clock
from tests.soak.measure import measure
from tests.soak.tenants import billed, make_tenants

JUMP_S = 2 * 3600
_DAY_S = 86_400
# A round with a custom loss, one with a save, and one with samples.
_ROUNDS = 3
_CLIENTS = 4
_FAULT_EVERY_S = 15.0
# Silence counts only while calls are taken, and a jump begins the count anew: it must fit between two jumps.
_SESSION_S = 20.0
# A result that was read lasts longer than one jump: a client that lost the answer asks again.
_ENGINE = f"""[engine]
lease_s = 2.0
ring_again_s = 1.0
snapshot_share = 0.05
session_s = {_SESSION_S}
result_read_s = {JUMP_S + 3600}
retain_s = {_DAY_S}
orphan_s = 600.0
"""


@dataclass(frozen=True, slots=True)
class Form:
    """Size of a run: `jumps` of two hours, `calm_s` seconds before each, how often each fault of chaos happens, and the
    shortest time between two."""

    jumps: int
    calm_s: float
    tenants: int
    dose: Mapping[str, int]
    fault_every_s: float = 0.0


SHORT = Form(jumps=6, calm_s=8.0, tenants=8, dose=dict.fromkeys(forms.SHORT.dose, 1))


def form(minutes: float) -> Form:
    """168 hours in 60 minutes. Faults are in the proportions of the long chaos run."""
    jumps = round(minutes / 60 * 168 * 3600 / JUMP_S)
    share = 60 * minutes / _FAULT_EVERY_S / sum(forms.LONG.dose.values())
    dose = {name: max(1, round(share * count)) for name, count in forms.LONG.dose.items()}
    return Form(jumps, 60 * minutes / jumps, 100, dose, _FAULT_EVERY_S)


@dataclass
class Report:
    """Report of a run, for assertions and for the JSON file."""

    seed: int
    plays: int = 0
    hours: int = 0
    left: int = 0
    """Sessions whose client left without a word."""
    dealt: Mapping[str, int] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """One line for each client that got something else, each wrong bill and each session that did not end."""


def stack(folder: Path, base: Path, clock: Clock) -> Stack:
    """Three trainers and a sampler; Valkey runs by `clock`."""
    sampler, trainer = 'backend = "transformers"\nmax_batch = 1', f'backend = "torch"\ncount = {TRAINERS}'
    return Stack(
        folder / "data",
        base,
        free_port(),
        trainer,
        sampler,
        _ENGINE,
        program="tests.warm_workers",
        threads=1,
        wrapper=clock.wrapper,
    )


class Week:
    """A run on a running stack. Its notes are written beside the stack's data folder."""

    def __init__(self, stack: Stack, clock: Clock, seed: int, form: Form) -> None:
        self._stack, self._clock, self._form = stack, clock, form
        self._records = RedisRecords(stack.redis())
        self._tenants = make_tenants(stack, form.tenants)
        self._plays: Counter[int] = Counter()
        self._left: list[str] = []
        self._report = Report(seed)
        self._killer = Killer(stack, Observer(stack), seed, form.dose, 0, self._note, form.fault_every_s)
        self._notes = stack.data_dir.parent / "week.log"
        self._lock = threading.Lock()

    def run(self) -> Report:
        """Runs the clients undisturbed once, and then through the week."""
        clients, over = range(_CLIENTS), threading.Event()
        with ThreadPoolExecutor(_CLIENTS + 1) as pool:
            expected = list(pool.map(self._play, clients, clients))
            bills = [billed(self._tenants[client]) for client in clients]
            playing = [pool.submit(self._play_on, client, expected[client], over) for client in clients]
            kills = pool.submit(self._noting, "killer", self._killer.run)
            try:
                self._noting("clock", self._pass_time)
                kills.result()
            finally:
                over.set()
            for client in playing:
                client.result()
        self._noting("end", self._await_end)
        for number, tenant in enumerate(self._tenants):
            self._noting(
                f"tenant {number}", partial(self._check_bill, tenant, self._plays[number], bills[number % _CLIENTS])
            )
        ahead_s = self._records.now() - time.time()
        self._report.plays, self._report.hours = self._plays.total(), round(ahead_s / 3600)
        self._report.left, self._report.dealt = len(self._left), dict(self._killer.dealt)
        return self._report

    def _play(self, client: int, tenant: int) -> Transcript:
        """Every play of a client has its seed, whoever is billed for it."""
        found = script.play(self._tenants[tenant], client, _ROUNDS, keep_s=_DAY_S)
        with self._lock:
            self._plays[tenant] += 1
        return found

    def _play_on(self, client: int, expected: Transcript, over: threading.Event) -> None:
        for tenant in itertools.cycle(range(client, len(self._tenants), _CLIENTS)):
            if over.is_set() or not self._noting(f"client {client}", partial(self._compare, client, tenant, expected)):
                return

    def _compare(self, client: int, tenant: int, expected: Transcript) -> None:
        if different := differences(expected, self._play(client, tenant)):
            raise AssertionError(f"not what the undisturbed run got: {different}")

    def _pass_time(self) -> None:
        for jump in range(self._form.jumps):
            self._left.append(self._leave(self._tenants[jump % len(self._tenants)]))
            time.sleep(self._form.calm_s)
            for name, value in patiently(partial(measure, self._stack)).items():
                self._report.series.setdefault(name, []).append(value)
            self._clock.jump(JUMP_S)
            self._note(f"jump {jump + 1}/{self._form.jumps}")

    def _leave(self, tenant: Stack) -> str:
        """Opens a session and its model, and sends nothing more."""
        session: str = self._ask(tenant, "create_session", {"sdk_version": "0.38.0", "tags": []})["session_id"]
        lora = {"rank": 4, "seed": 1}
        self._ask(
            tenant,
            "create_model",
            {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": lora},
        )
        return session

    def _ask(self, tenant: Stack, path: str, body: Mapping[str, Any]) -> Any:
        """Posts until it is answered, as a client does."""

        def post() -> Any:
            with suppress(requests.RequestException):
                answer = requests.post(
                    f"{tenant.url}/api/v1/{path}", json=body, headers={"X-API-Key": tenant.api_key}, timeout=30
                )
                assert answer.status_code < 400 or answer.status_code >= 500, answer.text
                return answer.ok and answer.json()

        return await_true(f"an answer to {path}", post)

    def _await_end(self) -> None:
        """All calls get their results, and all sessions that were left expire."""

        def left() -> list[str]:
            found = self._records.read(Session.namespace, self._left)
            return [session for session, fields in found if fields and fields["status"] == '"open"']

        await_true("every call terminal", lambda: not self._killer.observer.waiting())
        await_true("every session that was left expired", lambda: not left())

    def _check_bill(self, tenant: Stack, plays: int, once: Mapping[str, int]) -> None:
        expected, found = {kind: plays * amount for kind, amount in once.items()}, billed(tenant)
        if plays and found != expected:
            raise AssertionError(f"billed {found} for {plays} plays, not {expected}")

    def _noting(self, who: str, what: Callable[[], object]) -> bool:
        """Runs `what`. Returns False when it failed, which is a fault of the run."""
        try:
            what()
        except Exception as error:
            self._note(f"FAULT {who}: {error!r}")
            self._report.faults.append(f"{who}: {error!r}")
            return False
        return True

    def _note(self, line: str) -> None:
        with self._lock, self._notes.open("a") as notes:
            notes.write(f"{time.strftime('%H:%M:%S')} {line}\n")
