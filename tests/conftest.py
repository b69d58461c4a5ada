"""Rules for every test: no test is skipped, except those marked `gpu` where torch can use no GPU."""

from __future__ import annotations

import gc
import os
import shutil
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.stack.hardware import torch_is_for_cpus
from tests.scheduling import Scheduling, sort_key
from workers.process.startup import uncollected

# Servers, ranks and the test itself share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Waiting threads must not spin: with two cores they take the time of the threads they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Temporary folders are in memory, if there is room: files of a dead process remain there as on a disk, and an fsync
# costs nothing. On a shared disk it takes 5 ms, and a state server makes one for every call.
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 4 * 2**30
if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

_SKIPPED = "was skipped, and only tests marked `gpu` may be: "


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freezes the garbage collector after collection.

    Thousands of tests and all their imports stay in memory. Without collections that scan them, a run takes a sixth
    less CPU time.
    """
    with uncollected():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return Scheduling(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: sort_key(item.nodeid))
    for item in items:
        *tier, _ = item.path.relative_to(Path(__file__).parent).parts
        if tier:
            item.add_marker(tier[0])
    if reason := lacks_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


def lacks_gpu(devices: Path = Path("/dev")) -> str:
    """Returns the reason why tests marked `gpu` cannot run here, or an empty string."""
    if not any(devices.glob("nvidia[0-9]*")):
        return "no GPU on this machine"
    return "torch is a CPU build" if torch_is_for_cpus() else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports every failure by name, even if pytest cannot format it. Otherwise that would end the whole run."""
    with _without_finalizers():
        try:
            report = yield
        except Exception as error:
            report = _plain_report(item, call, error)
    if report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("gpu"):
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        _fail(report)
    return report


@contextmanager
def _without_finalizers() -> Iterator[None]:
    """Formats a traceback with the garbage collector off.

    pytest formats with `ast.parse`. In CPython 3.11 that raises SystemError when a collection runs in its middle and a
    finalizer, or a thread that runs meanwhile, formats a traceback as well.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _plain_report(item: pytest.Item, call: pytest.CallInfo[None], error: Exception) -> pytest.TestReport:
    """Python's own traceback of the test's failure, and the reason why pytest could not format it."""
    assert call.excinfo is not None
    text = "".join(traceback.format_exception(call.excinfo.value))
    return pytest.TestReport(
        item.nodeid,
        item.location,
        {},
        "failed",
        f"{text}\npytest could not format this failure: {error!r}",
        call.when,
        duration=call.duration,
        start=call.start,
        stop=call.stop,
    )


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid} {_SKIPPED}{reason}"
