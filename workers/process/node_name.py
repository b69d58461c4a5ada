"""The claim of a worker to the name of its node.

Leases and direct queues carry this name. A worker takes over from an earlier process of its node at once, so two live
workers of one name, as of two stacks on one Redis, would take each other's models again and again.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis

from app import ids
from app.errors import SetupError
from app.stores.redis.journal import RedisOpLog

log = logging.getLogger(__name__)
_LOOK_S = 0.5
# A process that was asked to end is killed after 10 s. Its successor may start before.
_ENDING_S = 12.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def claim(oplog: RedisOpLog, worker: str, queue: str, lease_s: float, ending_s: float = _ENDING_S) -> None:
    """Takes the name of the node for this process. Raises SetupError if another live worker keeps it.

    An ended process of this machine is replaced at once, and one that is ending, within `ending_s`, as soon as it has
    ended. Elsewhere, also in another container, a worker counts as live until it has not been heard for a lease. While
    the state server is away nobody can be asked, and the worker starts.
    """
    try:
        _claim(oplog, worker, queue, lease_s, ending_s)
    except redis.RedisError as error:
        log.warning("could not claim the name of this node: %s", error)


def _claim(oplog: RedisOpLog, worker: str, queue: str, lease_s: float, ending_s: float) -> None:
    node, over, began = ids.node_of(worker), "", time.monotonic()
    mine = json.dumps({"worker": worker, "queue": queue, **_process(os.getpid())})
    while found := oplog.claim_node(node, worker, mine, over):
        holder = json.loads(found)
        is_here = holder["machine"] == _machine()
        if is_here and not _runs(holder):
            over = found
        elif time.monotonic() - began > (ending_s if is_here else 2 * lease_s):
            where = f"process {holder['pid']} on this machine" if is_here else "on another machine or in a container"
            raise SetupError(
                f"another live worker on this state server has the name {node} ({where}): stop it, or give this one "
                "another name (--name, or the host's name). Two stacks on one machine need two Redis servers, or two "
                "databases of one"
            )
        else:
            time.sleep(_LOOK_S)


def _process(pid: int) -> dict[str, Any]:
    """The identity of a process: a later process may have the same number, but not the same start."""
    return {"machine": _machine(), "pid": pid, "born": _born(pid)}


def _machine() -> str:
    """The machine since its boot, and the namespace in which its process numbers count."""
    return f"{_BOOT_ID.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def _runs(holder: Mapping[str, Any]) -> bool:
    return bool(_born(holder["pid"])) and _born(holder["pid"]) == holder["born"]


def _born(pid: int) -> str:
    """The start of a process in ticks since the machine's boot; "" for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in b"ZX" else fields[19].decode()
