"""Expected state of a model from the results of a run: each Op with a successful result counts once, in order."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from app.domain.ops import CreateModel, DropGradients, ForwardBackward, LoadWeights, Op, OptimStep, SaveWeights
from app.domain.results import Result
from app.wire import results
from tests.property.vector_backend import State, VectorBackend
from workers.backends.training.base import Create


@dataclass
class Reference:
    """Takes a run's Ops in order with their visible results. Batches count; with `exact` all bits count too."""

    model: str
    exact: bool
    backend: VectorBackend = field(default_factory=VectorBackend)
    saved: dict[str, State] = field(default_factory=dict)
    window: list[str] = field(default_factory=list)
    """The calls since the last step, load or drop: "added", "refused" or "failed"."""
    missing: str | None = ""
    """The reason that a failed step names; empty if no gradient is missing, and None if the results do not show it."""
    reasons: set[str] = field(default_factory=set)
    """All reasons until now. A call that waited behind a lost gradient fails with that gradient's reason."""

    @property
    def state(self) -> State:
        return self.backend.states[self.model]

    def consumed(self, kind: str, reason: str) -> None:
        """Consumes a seq that was refused."""
        if kind == "lost_batch":
            self.window.append("refused")
        if kind == "forward_backward":
            self.window.append("failed")
        if kind == "drop_gradients":
            self._drop()
            self.window = ["dropped"]
        if kind != "skip":
            self._lose(reason)

    def ran(self, seq: int, op: Op, result: Result) -> None:
        if result.failed:
            self._failed(seq, op, result)
            return
        output = None
        match op:
            case CreateModel():
                self.backend.apply({self.model: Create(op.spec.lora)})
                self.window = []
            case SaveWeights():
                self.saved[f"tinker://{self.model}/{op.checkpoint_kind}/{op.name}"] = self._copy()
            case LoadWeights():
                self.backend.states[self.model] = _loaded(self.saved[op.source], op.optimizer)
                self.window = []
            case OptimStep():
                assert self._whole(), f"the step at seq {seq} ran on part of its gradients: {self.window}"
                output = self.backend.apply({self.model: op})[self.model]
                self.window = []
            case ForwardBackward():
                output = self.backend.apply({self.model: op})[self.model]
                if not op.forward_only:
                    self.window.append("added")
        if self._whole():
            self.missing = ""
        if self.exact and output is not None:
            assert result == results.of_output(op, output), f"seq {seq} has other bits than the undisturbed run"

    def _failed(self, seq: int, op: Op, result: Result) -> None:
        found = json.loads(result.body)
        error, given_up = found["error"], found["category"] == "server"
        if isinstance(op, OptimStep):
            named = error in self.reasons if not self.missing else f"is missing ({self.missing});" in error
            assert named or given_up or self.missing is None, (
                f"the step at seq {seq} fails with another reason: {error}"
            )
            self._drop()
            self.window, self.missing = [], ""
        if isinstance(op, ForwardBackward) and not op.forward_only:
            self.window.append("failed")
            self._lose(error if error in self.reasons else f"{op.kind} seq {seq} failed: {error}")
            if given_up:
                self.missing = None  # it may have waited behind a lost gradient, too

    def _lose(self, reason: str) -> None:
        self.missing = reason
        self.reasons.add(reason)

    def _whole(self) -> bool:
        """True if nothing failed or was dropped. A refused batch was sent again, with nothing added before it."""
        if "failed" in self.window:
            return False
        lost = [at for at, what in enumerate(self.window) if what != "added"]
        if not lost:
            return True
        return "added" not in self.window[: lost[-1]] and "added" in self.window[lost[-1] :]

    def _drop(self) -> None:
        self.backend.apply({self.model: DropGradients()})

    def _copy(self) -> State:
        state = self.state
        return State(state.rank, state.weight, state.moment, steps=[list(step) for step in state.steps])


def _loaded(saved: State, optimizer: bool) -> State:
    moment = saved.moment if optimizer else 0.0
    return State(saved.rank, saved.weight, moment, steps=[list(step) for step in saved.steps])
