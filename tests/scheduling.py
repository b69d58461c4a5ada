"""Assigns tests to processes (`--dist loadscope`).

Tests that share an expensive resource stay together, so that it is made once: a file's fixtures, and the stacks and
samplers that several files share. The first process takes the scopes in order, with all stacks first. Every other
process begins at the end, where the tests need nothing but a processor. So stacks, which wait a lot, seldom run beside
each other. The small files in between are what is left when the processes meet.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import PurePath

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

_FIRST = ("chaos", "upgrade", "contract", "conformance", "faults")
_LAST = ("security", "parity", "property", "mutants")
# A parameter of a fixture that several files of a folder share (tests/contract/conftest.py, tests/conformance/).
_SHARED = re.compile(r"\b(deepspeed-1-transformers|deepspeed-2-ranks-vllm)\b|\[(transformers|vllm)\b")


def sort_key(nodeid: str) -> int:
    """Sort key of tests; those of a folder stay in their order."""
    folder = "".join(PurePath(nodeid.partition("::")[0]).parent.parts[1:2])
    if folder in _FIRST:
        return _FIRST.index(folder) - len(_FIRST)
    return _LAST.index(folder) + 1 if folder in _LAST else 0


class Scheduling(LoadScopeScheduling):
    """xdist's own scheduling, except for the grouping of tests, the start of each process and its death."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        shared = _SHARED.search(nodeid)
        return f"{PurePath(path).parent} {shared[1] or shared[2]}" if shared else path

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node is not self.nodes[0]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        # A process may have died whose death xdist has not handled yet. Then others get its scopes, this one included.
        with contextlib.suppress(OSError):
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        """Assigns scopes to a process until three tests wait there, or all scopes are assigned.

        xdist assigns one scope, and the next when a test of it ends. After a process died, the scopes that it had
        finished are assigned once more. No test of them ends, so the run would never end.

        A process in place of a dead one may be known before it has collected. It gets scopes when it has.
        """
        if node not in self.registered_collections:
            return
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
            super()._reschedule(node)
