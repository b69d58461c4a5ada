"""Slots of sequences before vLLM: full while one project is alone, and shared while others wait."""

from __future__ import annotations

import asyncio
from collections import Counter

from workers.backends.sampling.base import RequestHandle
from workers.backends.sampling.vllm.slots import SequenceSlots, with_reserve, without_reserve

SLOTS = 16


def test_an_engine_has_the_slots_for_which_it_has_the_reserve():
    assert [without_reserve(with_reserve(slots)) for slots in range(1, 2000)] == list(range(1, 2000))
    assert with_reserve(without_reserve(1024)) == 1024
    assert without_reserve(1) == 1


class Engine:
    """Sequences that run until the test ends them."""

    def __init__(self) -> None:
        self.slots = SequenceSlots(SLOTS)
        self.running = Counter[str]()
        self.most = 0
        self.tasks: list[asyncio.Task[None]] = []
        self._ends: dict[str, list[asyncio.Event]] = {}

    async def come(self, project: str, count: int, weight: float = 1.0) -> RequestHandle:
        handle = RequestHandle(project=project, weight=weight)
        self.tasks += [asyncio.create_task(self._run(handle)) for _ in range(count)]
        await self.settle()
        return handle

    async def end(self, project: str, count: int) -> None:
        for _ in range(count):
            self._ends[project].pop().set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def close(self) -> None:
        while self.running.total():
            for project in list(self._ends):
                await self.end(project, len(self._ends[project]))
        await asyncio.gather(*self.tasks)

    async def _run(self, handle: RequestHandle) -> None:
        async with self.slots.slot(handle):
            if handle.aborted:
                return
            self.running[handle.project] += 1
            self.most = max(self.most, self.running.total())
            end = asyncio.Event()
            self._ends.setdefault(handle.project, []).append(end)
            await end.wait()
            self.running[handle.project] -= 1


def test_a_project_alone_has_all_slots_but_the_reserve():
    async def run() -> None:
        engine = Engine()
        await engine.come("long", 64)
        assert engine.running == {"long": SLOTS}
        await engine.close()
        assert engine.most == SLOTS

    asyncio.run(run())


def test_a_short_request_does_not_wait_for_a_long_one():
    async def run() -> None:
        engine = Engine()
        await engine.come("long", 64)
        await engine.come("short", 1)
        assert engine.running["short"] == 1
        await engine.close()

    asyncio.run(run())


def test_slots_that_become_free_go_to_the_project_with_the_fewest_until_each_has_its_share():
    async def run() -> None:
        engine = Engine()
        await engine.come("long", 64)
        await engine.come("other", 64)
        assert engine.running == {"long": SLOTS, "other": with_reserve(SLOTS) - SLOTS}
        await engine.end("long", SLOTS)
        assert engine.running == {"long": SLOTS // 2, "other": SLOTS // 2}
        await engine.close()
        assert engine.most <= with_reserve(SLOTS)

    asyncio.run(run())


def test_a_project_of_three_times_the_weight_gets_three_times_the_slots():
    async def run() -> None:
        engine = Engine()
        await engine.come("light", 64)
        await engine.come("heavy", 64, weight=3.0)
        await engine.end("light", SLOTS)
        assert engine.running == {"light": SLOTS // 4, "heavy": 3 * SLOTS // 4}
        await engine.close()

    asyncio.run(run())


def test_what_is_aborted_while_it_waits_never_runs_and_keeps_nobody_waiting():
    async def run() -> None:
        engine = Engine()
        await engine.come("long", SLOTS)
        handle = await engine.come("long", 5)
        behind = await engine.come("long", 1)
        await asyncio.to_thread(handle.abort)
        await engine.settle()
        await engine.end("long", 1)
        assert (engine.running, behind.aborted) == ({"long": SLOTS}, False)
        await engine.close()
        assert not engine.slots._waiting and not +engine.slots._running

    asyncio.run(run())
