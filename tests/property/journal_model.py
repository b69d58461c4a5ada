"""Model of a journal, as simple as possible: dictionaries and a list of rules, no Redis."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.domain.results import Result

STEP, BACKWARD = "optim_step", "forward_backward"
NO_REPLAY = ("forward", "save_weights")


@dataclass
class JournalledOp:
    kind: str
    payload: bytes = b""
    doomed: str = ""
    struck: int = 0
    runner: str = ""
    former: dict[str, bool] = field(default_factory=dict)
    """The workers that began it before and did not leave it: whether each was missed when it was begun last."""

    @property
    def attempts(self) -> int:
        return self.struck + sum(self.former.values())


@dataclass
class JournalModel:
    """Model of one journal. `ops` are the journaled Ops, `digests`/`refused` the uses of each seq."""

    applied: int = -1
    epoch: int = 0
    worker: str = ""
    holder: str = ""
    renewed: set[str] = field(default_factory=set)
    snapshot: str = ""
    snapshot_seq: int = -1
    ops: dict[int, JournalledOp] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)

    def admit(self, seq: int, kind: str, payload: bytes, digest: str) -> str:
        if seq in self.refused:
            return "refused"
        if seq in self.digests:
            return "repeat" if self.digests[seq] == digest else "conflict"
        if seq <= self.applied:
            return "consumed"
        self.digests[seq] = digest
        self.ops[seq] = JournalledOp(kind, payload)
        return "fresh"

    def refuse(self, seq: int, reason: str, kind: str) -> bool:
        if seq <= self.applied or seq in self.ops:
            return False
        if kind != "skip":
            self._doom_behind(seq, reason)
        self.refused[seq] = reason
        self.ops[seq] = JournalledOp(kind, doomed=reason)
        return True

    def acquire(self, worker: str) -> bool:
        if self.holder and _node(self.holder) != _node(worker):
            return False
        self.holder = worker
        if self.worker != worker:
            self.worker = worker
            self.epoch += 1
        return True

    def begin(self, seq: int, worker: str) -> bool:
        """Begins an Op. Returns True if one of the attempts is in doubt, because no lease expires here."""
        op = self.ops[seq]
        self.renewed -= {boot for boot in self.renewed if _node(boot) == _node(worker) and boot != worker}
        others = {*op.former, op.runner} - {worker, ""}
        op.former = {boot: boot not in self.renewed for boot in others}
        op.runner = worker
        return any(missed and _node(boot) != _node(worker) for boot, missed in op.former.items())

    def leave(self, seq: int, worker: str, epoch: int, strike: bool) -> None:
        op = self.ops[seq]
        op.former.pop(worker, None)
        op.runner = "" if op.runner == worker else op.runner
        op.struck += strike and epoch == self.epoch

    def commit(self, epoch: int, seq: int, result: Result, why: str) -> bool:
        if epoch != self.epoch or seq != self.applied + 1:
            return False
        self.applied = seq
        op = self.ops[seq]
        if result.failed or op.kind in NO_REPLAY:
            op.payload = b""
        if result.failed:
            op.doomed = op.doomed or why
            if op.kind == BACKWARD and seq not in self.refused:
                self._doom_behind(seq, op.doomed)
        if seq in self.digests:
            self.results[seq] = result
        return True

    def set_snapshot(self, epoch: int, seq: int, reference: str) -> str | None:
        """Returns the replaced snapshot; its own reference for a repeat, and None when it is refused."""
        if epoch == self.epoch and reference == self.snapshot:
            return reference
        if epoch != self.epoch or not self.snapshot_seq < seq <= self.applied:
            return None
        replaced = self.snapshot
        self.snapshot, self.snapshot_seq = reference, seq
        self.ops = {later: op for later, op in self.ops.items() if later > seq}
        return replaced

    def waiting(self) -> list[str]:
        """Kinds of the waiting Ops from the next seq on, without a gap."""
        kinds = []
        seq = self.applied + 1
        while seq in self.ops:
            kinds.append(self.ops[seq].kind)
            seq += 1
        return kinds

    def _doom_behind(self, lost: int, reason: str) -> None:
        for seq in sorted(seq for seq in self.ops if seq > lost):
            self.ops[seq].doomed = self.ops[seq].doomed or reason
            if self.ops[seq].kind == STEP:
                return


def _node(worker: str) -> str:
    return worker.rpartition("/")[0]
