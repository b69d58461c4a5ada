"""The memory and the CPU quota of a container count, not those of its host."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.stack import memory, valkey

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB, GIB = 2**20, 2**30


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """The files of a kernel with version 2: a group of 512 MiB that has a group without a bound."""
    inner = tmp_path / "groups" / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text(f"{512 * MIB}\n")
    return tmp_path / "groups"


def own(groups: Path, text: str) -> Path:
    file = groups.parent / "own"
    file.write_text(text)
    return file


def test_the_bound_of_any_group_above_the_process_counts(groups: Path):
    assert memory.usable_bytes(groups, own(groups, "0::/outer/inner\n")) == 512 * MIB
    assert memory.usable_bytes(groups, own(groups, "0::/other\n")) == MACHINE


def test_a_container_sees_its_own_group_as_the_root(groups: Path):
    (groups / "memory.max").write_text(f"{256 * MIB}\n")
    assert memory.usable_bytes(groups, own(groups, "0::/\n")) == 256 * MIB


def test_version_1_has_its_bounds_elsewhere_and_a_huge_number_for_none(groups: Path):
    folder = groups / "memory" / "docker"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{128 * MIB}\n")
    (groups / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    text = "4:memory,cpu:/docker\n3:pids:/outer\n"
    assert memory.usable_bytes(groups, own(groups, text)) == 128 * MIB
    assert memory.usable_bytes(groups, own(groups, "4:memory,cpu:/\n")) == MACHINE


@pytest.mark.parametrize(
    ("outer", "inner", "cores"),
    [
        ("max 100000", "max 100000", 16),
        ("max 100000", "200000 100000", 2),
        ("150000 100000", "max 100000", 2),
        ("20000 100000", "800000 100000", 1),
        ("3200000 100000", "max 100000", 16),
    ],
)
def test_the_lowest_cpu_quota_above_the_process_bounds_its_cores_rounded_up(
    outer: str, inner: str, cores: int, groups: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    (groups / "outer" / "cpu.max").write_text(f"{outer}\n")
    (groups / "outer" / "inner" / "cpu.max").write_text(f"{inner}\n")
    assert memory.usable_cores(groups, own(groups, "0::/outer/inner\n")) == cores
    assert memory.usable_cores(groups, own(groups, "0::/other\n")) == 16


@pytest.mark.parametrize(("quota", "cores"), [(250000, 3), (-1, 16)])
def test_version_1_has_the_cpu_quota_and_its_period_in_two_files(
    quota: int, cores: int, groups: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    folder = groups / "cpu" / "docker"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert memory.usable_cores(groups, own(groups, "4:memory:/docker\n3:cpu,cpuacct:/docker\n")) == cores


def test_without_control_groups_the_machine_is_the_bound(tmp_path: Path):
    assert memory.usable_bytes(tmp_path, tmp_path / "none") == MACHINE


def test_the_group_that_leaves_least_says_how_much_is_free(groups: Path):
    for group, used, unused in ((groups / "outer", 300 * MIB, 40 * MIB), (groups / "outer" / "inner", 90 * MIB, 0)):
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon {used - unused}\nactive_file 7\ninactive_file {unused}\n")
    process = own(groups, "0::/outer/inner\n")
    assert memory.free_bytes(MACHINE, groups, process) == (512 - 300 + 40) * MIB
    (groups / "outer" / "inner" / "memory.max").write_text(f"{128 * MIB}\n")
    assert memory.free_bytes(MACHINE, groups, process) == (128 - 90) * MIB
    assert memory.free_bytes(MIB, groups, process) == MIB, "the machine has less"


def test_version_1_says_in_other_files_how_much_is_free(groups: Path):
    job = groups / "memory" / "slurm" / "job"
    job.mkdir(parents=True)
    for group, bound, used in ((job, 2**63 - 4096, 70 * MIB), (job.parent, 128 * MIB, 100 * MIB)):
        (group / "memory.limit_in_bytes").write_text(f"{bound}\n")
        (group / "memory.usage_in_bytes").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"cache 9\ninactive_file 1\ntotal_inactive_file {8 * MIB}\n")
    assert memory.free_bytes(MACHINE, groups, own(groups, "4:memory:/slurm/job\n")) == (128 - 100 + 8) * MIB


def test_without_control_groups_the_free_memory_is_the_machines(tmp_path: Path):
    assert memory.free_bytes(5 * MIB, tmp_path, tmp_path / "none") == 5 * MIB


@pytest.mark.parametrize(
    ("total", "most", "room"),
    [
        (64 * MIB, 2 * GIB, 32 * MIB),
        (300 * MIB, 2 * GIB, 44 * MIB),
        (GIB, 2 * GIB, 512 * MIB),
        (2 * GIB, 2 * GIB, 1536 * MIB),
        (8 * GIB, GIB, GIB),
    ],
)
def test_new_weights_leave_half_of_their_file_system_but_at_least_256_and_at_most_512_mib_to_others(
    total: int, most: int, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found: list[str] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: found.append(str(folder)) or SimpleNamespace(total=total))
    assert memory.room_for_weights(tmp_path / "missing" / "yet", most) == room
    assert found == [str(tmp_path)]


def test_the_embedded_server_takes_a_quarter_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(valkey, "usable_bytes", lambda: 512 * MIB)
    valkey.command("valkey", tmp_path, tmp_path / "conf", 1, "password", valkey.DURABLE)
    assert f"maxmemory {128 * MIB}\n" in (tmp_path / "conf").read_text()


@pytest.mark.parametrize(
    ("group", "file", "text", "found"),
    [
        ("0::/outer/inner\n", "outer/inner/memory.events", "low 0\noom 2\noom_kill 5\noom_group_kill 0\n", 5),
        ("4:memory:/inner\n", "memory/inner/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 6\n", 6),
        ("0::/outer/inner\n", "unrelated", "", 7),
        ("4:memory:/inner\n", "memory/inner/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n", 7),
    ],
)
def test_the_kernels_kills_are_those_of_the_own_group_or_else_of_the_machine(
    group: str, file: str, text: str, found: int, groups: Path
):
    machine = groups.parent / "vmstat"
    machine.write_text("nr_free_pages 1\noom_kill 7\n")
    (groups / file).parent.mkdir(parents=True, exist_ok=True)
    (groups / file).write_text(text)
    assert memory.oom_kills(groups, own(groups, group), machine) == found
    assert memory.oom_kills(groups, own(groups, ""), groups / "nowhere") == 0
