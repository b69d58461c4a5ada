"""The trainer that both backends share. Callers use rank 0; the other ranks `follow` its calls, sent as bytes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from app.domain.ops import AdamParams, DropGradients, ForwardBackward, OptimStep
from app.domain.records import BaseModelInfo
from app.domain.results import Done, OptimStepOutput, Output
from app.errors import NoMemory, OpError, ServerOpError, UserOpError, WeightsOverflow
from app.settings import BaseModelSettings
from workers.backends import devices
from workers.backends.failures import StallDetector, lost_device, ran_out_of_memory
from workers.backends.training.base import BackendOp, Create, Load, Writer, decode, encode_apply, encode_call
from workers.backends.training.batch_ops import Job, fetch
from workers.backends.training.engine import Engine, EngineLost
from workers.backends.training.memory import warn_if_short
from workers.backends.training.optimizer import step_all
from workers.backends.training.passes import OutOfMemory, Pass
from workers.backends.training.ranks import total_norms
from workers.backends.training.states.adapter import AdapterModels
from workers.backends.training.states.base import Models, ModelState, read_gradients
from workers.backends.training.states.full import ComputeCopy, FullFinetuneModels
from workers.backends.training.states.residency import Residency
from workers.models import lora
from workers.models.base_model import LoadedBase

T = TypeVar("T")
Results = dict[str, Output | OpError]
_GRADIENT_NOT_FINITE = (
    "every loss is finite, but the gradient is not; nothing was added to the pending gradient. Check the batch's "
    "weights and advantages"
)


class Trainer(ABC):
    """A TrainingBackend over an Engine. Calls come one at a time; any thread may call `describe` and `healthy`."""

    def __init__(self, settings: BaseModelSettings, *, full: bool = False) -> None:
        """`full`: the models are fully fine-tuned, without adapters."""
        self._settings, self._full = settings, full
        self._states: dict[str, ModelState] = {}
        self._engine: Engine
        self._models: Models
        self._micro_batch_tokens: int
        self._residency: Residency
        self._stall_detector = StallDetector()
        self._broken = False

    @abstractmethod
    def start_engine(self) -> Engine:
        """Loads the base and wraps it in an Engine. Raises SetupError."""

    def prepare(self, base: LoadedBase) -> Mapping[str, nn.Parameter]:
        """Prepares `base`, just loaded, for adapters or full fine-tuning; returns its trained parameters by name."""
        if not self._full:
            lora.wrap(base.model)
            return {}
        return dict(base.model.requires_grad_(True).named_parameters())

    def open(self) -> BaseModelInfo:
        """Loads the base. Every rank calls this itself. Raises SetupError, UnservableModel for a base that cannot be
        trained."""
        self._engine = self.start_engine()
        self._engine.hidden_states.check_runs(self._settings, self._engine.base.device)
        self._models = self._make_models(self._engine)
        self._micro_batch_tokens = self._agreed_tokens()
        self._residency = Residency(self._engine.base.device, self._settings.trainer.device_models)
        return self._engine.base.info

    def apply(self, ops: Mapping[str, BackendOp]) -> Mapping[str, Output | OpError]:
        with self._guarded():
            if self._engine.ranks.size > 1:  # encoding a batch takes time and memory
                self._engine.ranks.send(encode_apply(ops))
            return self._apply(ops)

    def capture(self, model_id: str, *, optimizer: bool, gradients: bool = False, rounded: bool = False) -> Writer:
        with self._guarded():
            self._engine.ranks.send(encode_call("capture", model_id, optimizer, gradients, rounded))
            return self._state(model_id).capture(optimizer=optimizer, gradients=gradients, rounded=rounded)

    def export(self, model_id: str) -> Writer:
        with self._guarded():
            self._engine.ranks.send(encode_call("export", model_id))
            return self._export(model_id)

    def close(self, model_id: str) -> None:
        self._forget(model_id)
        if not self._broken:
            with self._guarded():
                self._engine.ranks.send(encode_call("close", model_id))

    def free_memory(self) -> None:
        if not self._broken:
            with self._guarded():
                self._engine.ranks.send(encode_call("free_memory"))
                self._free_memory()

    def healthy(self) -> bool:
        sound = not self._broken and not self._engine.ranks.lost_one()
        return sound and self._stall_detector.seconds <= self._settings.trainer.rank_deadline_s

    def shutdown(self) -> None:
        """Lets the other ranks leave `follow`; nothing may be called afterwards. A broken group ends by itself."""
        if self._broken:
            return
        with suppress(RuntimeError), self._guarded():
            self._engine.ranks.send(encode_call("shutdown"))
            self._engine.ranks.leave()

    def describe(self) -> Mapping[str, Any]:
        base, ranks = self._engine.base, self._engine.ranks
        return {
            "backend": self._settings.trainer.backend,
            "ranks": ranks.size,
            "dtype": base.info.dtype,
            "devices": devices.names(base.device.type, ranks.size),
            "micro_batch_tokens": self._micro_batch_tokens,
            "fused_kernels": self._engine.hidden_states.fused,
            "models": len(self._states),
            "models_on_device": len(self._residency),
            **self._engine.describe(),
        }

    def follow(self) -> None:
        """Takes part in rank 0's calls until its `shutdown`. Every other rank runs this after `open`.

        Raises when rank 0 is gone or a pass failed here; the process must then end, and with it the group. Ends the
        process itself where it is stuck after another rank has ended.
        """
        threading.Thread(target=self._engine.ranks.end_after_loss, daemon=True).start()
        while True:
            match decode(self._engine.ranks.receive()):
                case ("apply", ops):
                    self._apply(ops)
                case ("capture", model_id, optimizer, gradients, rounded):
                    with suppress(OpError):  # rank 0 raises the same
                        self._state(model_id).capture(optimizer=optimizer, gradients=gradients, rounded=rounded)
                case ("export", model_id):
                    with suppress(OpError):
                        self._export(model_id)
                case ("close", model_id):
                    self._forget(model_id)
                case ("free_memory",):
                    self._free_memory()
                case _:
                    return self._engine.ranks.leave()

    def gradients(self, model_id: str) -> dict[str, Any]:
        """Returns the pending gradient that this rank holds: fp32 numpy arrays by PEFT name or parameter name.

        Empty when there is none. For tests and debugging.
        """
        return {name: g.cpu().numpy().copy() for name, g in self._states[model_id].pending_gradients().items()}

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Wraps a call of rank 0. Marks this process broken when its ranks are out of step, or it lost a device or the
        engine."""
        try:
            with self._stall_detector.call():
                yield
        except OpError:
            raise
        except Exception as error:
            lost = self._engine.ranks.size > 1 or isinstance(error, EngineLost) or lost_device(error)
            self._broken = self._broken or lost
            raise

    def _apply(self, ops: Mapping[str, BackendOp]) -> Results:
        steps = {model_id: op for model_id, op in ops.items() if isinstance(op, OptimStep)}
        results = self._optim_steps(steps)
        others = {model_id: op for model_id, op in ops.items() if not isinstance(op, OptimStep)}
        batches: defaultdict[tuple[bool, bool], dict[str, ForwardBackward]] = defaultdict(dict)
        for model_id, op in others.items():
            try:
                if isinstance(op, ForwardBackward):
                    critic = self._state(model_id).critic
                    self._engine.base.check_images(op.batch.images, "datum")
                    batches[op.forward_only, critic][model_id] = op
                else:
                    results[model_id] = self._apply_alone(model_id, op)
            except OpError as error:
                results[model_id] = error
        for batch in batches.values():
            for group in self._groups(batch):
                results |= self._forward_backward(group)
        return {model_id: results[model_id] for model_id in ops}

    def _apply_alone(self, model_id: str, op: Create | Load | DropGradients) -> Output:
        match op:
            case Create():
                self._states[model_id] = self._made(model_id, partial(self._create, op))
            case Load():
                self._states[model_id] = self._made(model_id, partial(self._load, self._state(model_id), op))
            case DropGradients():
                self._state(model_id).drop_pending()
        return Done()

    def _made(self, model_id: str, make: Callable[[], ModelState]) -> ModelState:
        state = self._with_room([model_id], make)
        if state is None:
            raise NoMemory(
                "memory ran out, though no other model was on the device; use a LoRA adapter of a smaller rank, or ask "
                "the operator for devices with more memory"
            )
        return state

    def _optim_steps(self, ops: Mapping[str, OptimStep]) -> Results:
        results: Results = {m: _not_loaded(m) for m in ops if m not in self._states}
        for group in self._groups({m: op.params for m, op in ops.items() if m in self._states}):
            results |= self._step_together(group)
        return results

    def _bring(self, model_ids: Collection[str]) -> bool:
        """Brings models to the device. Returns False if they do not fit."""
        return self._with_room(model_ids, lambda: True) is not None

    def _with_room(self, model_ids: Collection[str], run: Callable[[], T]) -> T | None:
        """Brings models to the device and runs a part of a call, as RankGroup.agreed does. Where memory runs out, all
        other models leave the device, and it runs again."""

        def bring_and_run() -> T:
            self._residency.bring(self._states, model_ids)
            return run()

        found = self._engine.ranks.agreed(bring_and_run)
        if found is None and self._residency.keep_only(self._states, model_ids):
            found = self._engine.ranks.agreed(bring_and_run)
        return found

    def _groups(self, models: Mapping[str, T]) -> Iterator[dict[str, T]]:
        """Yields groups of models, each of as many as stay on the device."""
        ids, most = list(models), self._settings.trainer.device_models or len(models) or 1
        for first in range(0, len(ids), most):
            yield {model_id: models[model_id] for model_id in ids[first : first + most]}

    def _step_together(self, params: Mapping[str, AdamParams]) -> Results:
        """Steps models, each to the bits of its step alone. The host waits for gradient norms that are not known yet
        (one that is not finite refuses its step), and then for those of the stepped weights (one that is not finite
        fails its step too late: the state is spoiled)."""
        states = {model_id: self._states[model_id] for model_id in params}
        steps = self._with_room(params, lambda: [state.begin_step(params[m]) for m, state in states.items()])
        if steps is None and len(params) == 1:
            return dict.fromkeys(params, NoMemory("memory ran out in an optimizer step; no step was taken"))
        if steps is None:
            return {m: result for m, one in params.items() for result in self._step_together({m: one}).values()}
        for state in states.values():
            state.pending_norm = None  # a step may scale the gradients, and then fail
        found = step_all(steps)
        results: Results = {}
        grad_norms: dict[str, float] = {}
        for model_id, one in zip(states, found, strict=True):
            if isinstance(one, UserOpError):
                results[model_id] = one
            else:
                states[model_id].end_step()
                grad_norms[model_id] = one
        param_norms = total_norms([(states[model_id].shards, states[model_id].weights()) for model_id in grad_norms])
        for (model_id, grad_norm), param_norm in zip(grad_norms.items(), param_norms, strict=True):
            rate = params[model_id].learning_rate
            metrics = {"grad_norm": grad_norm, "learning_rate": rate, "param_norm": float(param_norm)}
            results[model_id] = OptimStepOutput(metrics) if param_norm.isfinite() else _overflow(metrics)
        return results

    def _forward_backward(self, ops: Mapping[str, ForwardBackward]) -> Results:
        if len(ops) > 1 and self._full:  # the engine holds the weights of one such model at a time
            return self._one_by_one(ops)
        jobs = self._run(ops) if self._bring(ops) else None
        if jobs is None and len(ops) > 1:  # an Op that is too large must not fail the others
            return self._one_by_one(ops)
        if jobs is None and self._residency.keep_only(self._states, ops):  # idle models of others had the memory
            jobs = self._run(ops)
        return {m: self._too_large(op) for m, op in ops.items()} if jobs is None else self._finish(jobs)

    def _one_by_one(self, ops: Mapping[str, ForwardBackward]) -> Results:
        return {m: result for m, op in ops.items() for result in self._forward_backward({m: op}).values()}

    def _run(self, ops: Mapping[str, ForwardBackward]) -> dict[str, Job] | None:
        """Runs one pass. Returns None when memory ran out; the state is then unchanged.

        Raises instead where the ranks are out of step.
        """
        states = {model_id: self._state(model_id) for model_id in ops}
        for state in states.values():
            state.begin()
        try:
            device = self._engine.base.device
            jobs = self._engine.ranks.agreed(lambda: {m: Job.of(op, states[m], device) for m, op in ops.items()})
            if jobs is None:
                raise OutOfMemory
            one = Pass(self._engine, list(jobs.values()), self._micro_batch_tokens)
            one.run(self._stall_detector.progress)
        except Exception as error:
            for state in states.values():  # the base's own parameters would keep these gradients, for the next model
                state.drop_found()
            self._engine.rest()
            in_step = isinstance(error, OutOfMemory) or self._engine.ranks.size == 1
            if not in_step or not ran_out_of_memory(error):
                raise
            return None
        return jobs

    def _too_large(self, op: ForwardBackward) -> NoMemory:
        longest, budget = max(n for (n,) in op.batch.tokens.shapes), self._micro_batch_tokens
        return NoMemory(
            f"memory ran out in a pass of at most {max(longest, budget)} tokens (the trainer's micro_batch_tokens is "
            f"{budget}, the longest datum has {longest}); the model is unchanged. Send shorter datums, or ask the "
            "operator to lower trainer.micro_batch_tokens or to turn on trainer.activation_checkpointing"
        )

    def _finish(self, jobs: Mapping[str, Job]) -> Results:
        """Ends the Ops of a pass. The host waits for all results, and for the norms of all gradients."""
        try:
            fetch(jobs.values())
            errors = {model_id: job.error() for model_id, job in jobs.items()}
            kept = {m: job.state for m, job in jobs.items() if not job.op.forward_only and errors[m] is None}
            norms = total_norms([(state.shards, state.found_gradients()) for state in kept.values()])
            for (model_id, state), norm in zip(kept.items(), norms, strict=True):
                if norm.isfinite():
                    state.keep(norm)
                else:
                    errors[model_id] = UserOpError(_GRADIENT_NOT_FINITE)
            return {model_id: errors[model_id] or job.output() for model_id, job in jobs.items()}
        finally:
            for job in jobs.values():
                job.state.drop_found()

    def _create(self, op: Create) -> ModelState:
        if op.source is None:
            return self._models.fresh(op)
        state = self._models.read(op.source, optimizer=op.optimizer, critic=op.critic)
        if op.gradients and (pending := read_gradients(op.source)):
            state.restore_pending(pending)
        return state

    def _load(self, present: ModelState, op: Load) -> ModelState:
        loaded = self._models.read(op.source, optimizer=op.optimizer, critic=present.critic)
        present.check_same_shape(loaded)
        return loaded

    def _agreed_tokens(self) -> int:
        """Returns the tokens of a micro-batch: the least that any rank chooses, since the ranks share micro-batches."""
        setting = self._settings.trainer.micro_batch_tokens
        if setting != "auto":
            return setting
        engine = self._engine
        return -engine.ranks.greatest(-engine.hidden_states.micro_batch_tokens(engine.base.device))

    def _make_models(self, engine: Engine) -> Models:
        if not self._full:
            return AdapterModels(engine, self._settings.hub_id)
        warn_if_short(engine.base.model, self._settings.trainer, engine.base.device)
        master_device = torch.device("cpu") if self._settings.trainer.offload else engine.base.device
        return FullFinetuneModels(engine, ComputeCopy(engine), self._settings.path, master_device)

    def _export(self, model_id: str) -> Writer:
        if not self._bring([model_id]):
            raise NoMemory("memory ran out; nothing was exported")
        return self._state(model_id).export()

    def _free_memory(self) -> None:
        """Returns once every rank has freed its memory: a sampler may take it then."""
        torch.cuda.empty_cache()  # does nothing without a GPU
        devices.free_pinned()
        self._engine.ranks.count(True)

    def _forget(self, model_id: str) -> None:
        self._states.pop(model_id, None)
        self._residency.forget(model_id)

    def _state(self, model_id: str) -> ModelState:
        state = self._states.get(model_id)
        if state is None:
            raise _not_loaded(model_id)
        return state


def _overflow(metrics: Mapping[str, float]) -> WeightsOverflow:
    return WeightsOverflow(
        f"the step would make weights of norm {metrics['param_norm']} with learning_rate {metrics['learning_rate']}; "
        "no step was taken. Lower the learning rate or the weight decay, or load a checkpoint with finite weights"
    )


def _not_loaded(model_id: str) -> ServerOpError:
    return ServerOpError(f"model {model_id} is not loaded in this trainer")
