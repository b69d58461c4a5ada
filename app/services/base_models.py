"""The base models that this installation serves, from its settings and the records of its live workers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from app import ids
from app.dispatch import sample_queue, train_queue
from app.domain.adapters import Shapes, of_rows
from app.domain.ops import LoraSpec
from app.domain.records import LAST_WORKERS, LATER_FACTS, BaseModelInfo, Demand, Refusal, Worker
from app.errors import BadRequest, Unavailable
from app.services.validation import check_sampled
from app.settings import BaseModelSettings, Settings
from app.stores.redis.records import RedisRecords, load

ROLES = ("trainer", "sampler")
FULL_TRAINER, FULL_SAMPLER = "full_trainer", "full_sampler"
_SECTIONS = {"trainer": "trainer", "sampler": "sampler", FULL_TRAINER: "full", FULL_SAMPLER: "full_sampler"}
TRAINER_ROLES = ("trainer", FULL_TRAINER)
NEVER_ADAPTED = "never_adapted"
"""The part of a LoRA trainer's description that names the modules without adapters, with the reasons."""
SHAPES = "shapes"
"""The part of a trainer's description that holds shapes as rows (app/domain/adapters.py): those of all adapters, or of
a full fine-tuning trainer's weights, as the only group WEIGHTS."""
WEIGHTS = "weights"


def trainer_role(*, full: bool) -> str:
    """The role of a model's trainer, as in the worker records."""
    return FULL_TRAINER if full else "trainer"


def sampler_role(*, full: bool) -> str:
    """The role of a model's samplers, as in the worker records."""
    return FULL_SAMPLER if full else "sampler"


class BaseModels:
    """Settings and worker-reported facts of the base models served: of the workers of a role, those that hold for all.
    Facts stay known while a worker restarts: they belong to the base model, and the waiting Ops stay in the journal."""

    def __init__(self, settings: Settings, records: RedisRecords) -> None:
        self._settings = settings
        self._records = records
        self._tokenizers = {base.name: _located(base.tokenizer or base.path) for base in settings.base_models}
        self._known: dict[tuple[str, str], BaseModelInfo] = {}
        self._shapes: dict[tuple[str, str], list[list[Any]]] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Names of the base models served, whether their workers are up or not."""
        return [base.name for base in self._settings.base_models]

    def settings(self, name: str) -> BaseModelSettings:
        """The settings of base model `name`. Raises BadRequest for a name that is not served, and lists the served
        names."""
        found = self._settings.base_model(name)
        if found is None:
            raise BadRequest(
                f"base_model {name[:200]!r} is not served here; the served base models are: {', '.join(self.names())}"
            )
        return found

    def info(self, role: str, name: str) -> BaseModelInfo:
        """The facts that a trainer or sampler reported about `name`. Raises BadRequest, also when such workers cannot
        serve it or are not started, or Unavailable until the first such worker is up."""
        base = self.settings(name)
        found = self.known(role, name)
        if found is None:
            if role not in roles(base):
                raise BadRequest(f"{name} has no {role} here: {_SECTIONS[role]}.count is 0 in the server's settings")
            if reason := self._refusals().get((role, name)):
                raise BadRequest(f"no {role} can serve {name}: {reason}")
            found = self._of_last_worker(role, name)
        if found is None:
            self._records.put_demand(role, name)
            raise Unavailable(f"no {role} for {name} is up yet; try again soon")
        return found

    def known(self, role: str, name: str) -> BaseModelInfo | None:
        """The same facts, or None while no worker has reported any."""
        if (role, name) not in self._known:
            self._read_workers()
        return self._known.get((role, name))

    def check_sampled(self, lora: LoraSpec, name: str) -> None:
        """Raises BadRequest for an adapter that the samplers of `name` cannot apply. Samplers that were started again
        may apply more than the known ones did, so a refusal looks at the present ones."""
        try:
            check_sampled(lora, self.known("trainer", name), self.known("sampler", name))
        except BadRequest:
            self._read_workers()
            check_sampled(lora, self.known("trainer", name), self.known("sampler", name))

    def _of_last_worker(self, role: str, name: str) -> BaseModelInfo | None:
        """The facts that the last worker reported, or None if there was none."""
        fields = self._records.get(LAST_WORKERS, Refusal.id(role, name))
        if fields is None:
            return None
        self._learn([load(Worker, fields)])
        return self._known[role, name]

    def demanded(self) -> set[tuple[str, str]]:
        """(role, base model) of each worker that is needed although no call of its queue waits."""
        found = (load(Demand, fields) for _, fields in self._records.list(Demand.namespace))
        return {(demand.role, demand.base_model) for demand in found}

    def adapter_shapes(self, name: str) -> Shapes:
        """The shapes of all adapters of `name`, as a LoRA trainer reported them. Raises the errors of `info`."""
        return self._reported(trainer_role(full=False), name)

    def weight_shapes(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the weights of `name`, without experts, by their names in a checkpoint's files: as a trainer
        for full fine-tuning reported them. Raises the errors of `info`."""
        return self._reported(trainer_role(full=True), name)[WEIGHTS]

    def _reported(self, role: str, name: str) -> dict[str, dict[str, Any]]:
        self.info(role, name)
        if (role, name) not in self._shapes:
            self._read_workers()
        if (role, name) not in self._shapes:
            raise Unavailable(f"no {role} for {name} has reported its shapes yet; try again soon")
        return of_rows(self._shapes[role, name])

    def live(self) -> set[tuple[str, str]]:
        """(role, base model) of every worker with a current heartbeat that is healthy."""
        return {(worker.role, worker.base_model) for worker in self.workers().values()}

    def workers(self) -> dict[str, Worker]:
        """Healthy workers with a current heartbeat, by node."""
        return {node: worker for node, worker in self._read_workers().items() if worker.healthy}

    def _read_workers(self) -> dict[str, Worker]:
        """Workers with a current heartbeat, by node. Learns the facts that they report."""
        workers = {node: load(Worker, fields) for node, fields in self._records.list(Worker.namespace)}
        self._learn(workers.values())
        return workers

    def _learn(self, workers: Iterable[Worker]) -> None:
        grouped: defaultdict[tuple[str, str], list[Worker]] = defaultdict(list)
        for worker in workers:
            grouped[worker.role, worker.base_model].append(worker)
        with self._lock:
            for role_and_base, found in grouped.items():
                for worker in found:
                    if SHAPES in worker.describe:
                        self._shapes[role_and_base] = worker.describe[SHAPES]
                healthy = [worker for worker in found if worker.healthy]
                if healthy or role_and_base not in self._known:
                    self._known[role_and_base] = _common([_info(worker) for worker in healthy or found])

    def missing(self) -> list[str]:
        """The workers that must still start before every served base model can be trained and sampled.

        Workers that cannot serve their base model are left out, unless no worker serves any.
        """
        live, refused = self.live(), self._refusals()
        needed = [(role, base.name) for base in self._settings.base_models for role in roles(base)]
        absent = [worker for worker in needed if worker not in live]
        starting = [worker for worker in absent if worker not in refused]
        return [f"{role} for {name}" for role, name in starting or (absent if len(absent) == len(needed) else [])]

    def capabilities(self) -> list[dict[str, Any]]:
        """One entry of get_server_capabilities for each served base model."""
        workers = {(worker.role, worker.base_model): worker for worker in self.workers().values()}
        refused = {worker: reason for worker, reason in self._refusals().items() if worker not in workers}
        return [
            {
                "model_name": base.name,
                "max_context_length": self._max_context(base),
                "trainable": ("trainer", base.name) in workers,
                "sampleable": ("sampler", base.name) in workers,
                **self._coverage(workers.get(("trainer", base.name))),
                "refusals": {role: refused[role, base.name] for role in roles(base) if (role, base.name) in refused},
            }
            for base in self._settings.base_models
        ]

    def _coverage(self, trainer: Worker | None) -> dict[str, Any]:
        """The base's dtype, the groups of weights that adapters cover, and the modules that none covers, with the
        reasons."""
        if trainer is None:
            return {"dtype": None, "trainable_groups": None, "never_adapted": {}}
        info, never = self._known[trainer.role, trainer.base_model], trainer.describe.get(NEVER_ADAPTED, {})
        return {"dtype": info.dtype, "trainable_groups": list(info.trainable_groups), "never_adapted": never}

    def _refusals(self) -> dict[tuple[str, str], str]:
        """The reasons why workers cannot serve a base model, by role and base model."""
        found = (load(Refusal, fields) for _, fields in self._records.list(Refusal.namespace))
        return {(refusal.role, refusal.base_model): refusal.reason for refusal in found}

    def client_tokenizer(self, name: str) -> str:
        """The source from which a client loads the tokenizer: a hub id, or an absolute folder if clients are on this
        machine."""
        source = self.tokenizer(name)
        return source if self._settings.names_folders or not Path(source).is_dir() else ids.hub_id(name)

    def tokenizer(self, name: str) -> str:
        """The location of the model's tokenizer: a hub id, or an absolute folder."""
        source, folder = self._tokenizers.get(name) or _located(name)
        return str(folder) if folder.is_dir() else source

    def arch(self, name: str) -> str | None:
        """The architecture, or None until a worker has reported it."""
        found = self._known.get(("trainer", name)) or self._known.get(("sampler", name))
        return found.arch if found else None

    def _max_context(self, base: BaseModelSettings) -> int | None:
        known = [self._known[role, base.name].max_context for role in ROLES if (role, base.name) in self._known]
        return min(known) if known else base.max_context or None


def lora_coverage(running: Mapping[str, Any]) -> str:
    """A line on the weights that LoRA adapters cover, for a trainable model of `capabilities`."""
    never = f"; never on {', '.join(running['never_adapted'])}" if running["never_adapted"] else ""
    return f"LoRA on {', '.join(running['trainable_groups'])}{never}"


def roles(base: BaseModelSettings) -> Sequence[str]:
    """The roles of the workers that serve a base model."""
    sections = base.workers
    return [role for role, name in _SECTIONS.items() if name in sections and sections[name].count]


def queue_of(role: str, name: str) -> str:
    """The queue that the workers of a role share."""
    full = role in (FULL_TRAINER, FULL_SAMPLER)
    return train_queue(name, full=full) if role in TRAINER_ROLES else sample_queue(name, full=full)


def _located(source: str) -> tuple[str, Path]:
    """The source, and the absolute folder that it means if there is one. Symbolic links are not followed: every
    get_info would ask the system for each part of the path."""
    return source, Path(source).expanduser().absolute()


def _info(worker: Worker) -> BaseModelInfo:
    later = {fact: worker.describe.get(fact, False) for fact in LATER_FACTS}
    return BaseModelInfo(**{**worker.info, "trainable_groups": tuple(worker.info["trainable_groups"]), **later})


def _common(infos: Sequence[BaseModelInfo]) -> BaseModelInfo:
    """The facts that hold for all of these workers: a call may run on any of them."""
    first = infos[0]
    return replace(
        first,
        max_context=min(info.max_context for info in infos),
        trainable_groups=tuple(
            group for group in first.trainable_groups if all(group in info.trainable_groups for info in infos)
        ),
        reads_images=all(info.reads_images for info in infos),
        follows_schemas=all(info.follows_schemas for info in infos),
    )
