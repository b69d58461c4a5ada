"""Placement of workers on this machine's GPUs. A GPU has several workers only where the settings say so: they name it
in `devices` of each, or their memory shares leave room on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from app.errors import SetupError
from app.settings import BaseModelSettings, SamplerSettings, Settings, TrainerSettings
from app.settings.gpus import gpus_of_copies

_ROUNDING = 1e-9


class _Section(NamedTuple):
    """The workers of one section, and the section's `name` in the settings of the base model `base`."""

    base: str
    name: str
    workers: TrainerSettings | SamplerSettings
    trainer: _Section | None = None
    """The trainer whose GPUs this sampler uses in turns with it."""

    @property
    def share(self) -> float:
        """The part of a GPU's memory that this section adds. A sampler that takes turns adds only what it needs beyond
        its trainer's part."""
        return max(0.0, self.workers.gpu_share - (self.trainer.workers.gpu_share if self.trainer else 0.0))

    @property
    def elsewhere(self) -> bool:
        """True when a hostfile says on which machines its ranks are."""
        return bool(getattr(self.workers, "hostfile", ""))

    def copies(self) -> tuple[tuple[int, ...], ...]:
        try:
            return gpus_of_copies(self.name, self.workers.devices, self.workers.count)
        except SetupError as error:
            raise SetupError(f"base model {self.base!r}: {error}") from None

    @property
    def gpus(self) -> list[int]:
        """The GPUs that it names, of all copies."""
        return [gpu for gpus in self.copies() for gpu in gpus]


def check(settings: Settings) -> None:
    """Checks the GPUs that are named: enough for each copy, each once, with memory shares of at most 1 in all on each.

    Raises SetupError. Sections that name the same GPU share its memory.
    """
    for base in settings.base_models:
        base.check_turns()
    for section in _sections(settings):
        for gpus in section.copies():
            _check_copy(section, gpus)
        if section.trainer is not None:
            _check_turns(section, section.trainer)
    for gpu, named in _shares(settings).items():
        if sum(named.values()) > 1 + _ROUNDING:
            raise SetupError(
                f"the memory shares of GPU {gpu} add up to more than 1: {_parts(named)}; lower them, or give each "
                "worker its own GPUs"
            )


def place(settings: Settings, gpus: Callable[[], Sequence[int]]) -> Settings:
    """Returns the settings with `devices` for each section that has none, unless this machine shows no GPU.

    Each copy gets the GPUs whose memory is shared out least, as long as its own share has room there: free ones first.
    A sampler that takes turns with a trainer gets GPUs of this trainer. Raises SetupError when there are too few.
    """
    missing = [section for section in _sections(settings) if not (section.workers.devices or section.elsewhere)]
    visible = gpus() if missing else ()
    if not visible:
        return settings
    usable, taken = _without_hostfiles(settings, visible), _shares(settings)
    placed: dict[tuple[str, str], list[list[int]]] = {}
    for section in missing:
        allowed = usable
        if (trainer := section.trainer) is not None:
            allowed = trainer.gpus or placed[trainer.base, trainer.name][0]
        placed[section.base, section.name] = _free(section, allowed, taken)
    bases = [_with_devices(base, placed) for base in settings.base_models]
    return settings.model_copy(update={"base_models": tuple(bases)})


def _sections(settings: Settings) -> Iterator[_Section]:
    for base in settings.base_models:
        sections = {name: _Section(base.name, name, workers) for name, workers in base.workers.items()}
        for full, trainer, sampler in ((False, "trainer", "sampler"), (True, "full", "full_sampler")):
            if base.takes_turns(full=full) and trainer in sections:
                sections[sampler] = sections[sampler]._replace(trainer=sections[trainer])
        yield from sections.values()


def _check_copy(section: _Section, gpus: tuple[int, ...]) -> None:
    needed = 1 if section.elsewhere else section.workers.gpus_needed
    if gpus and len(set(gpus)) < max(len(gpus), needed):
        raise SetupError(
            f"base model {section.base!r}: {section.name}.devices gives one worker {list(gpus)}, but its settings need "
            f"{needed}; name as many GPUs, each once"
        )


def _check_turns(section: _Section, trainer: _Section) -> None:
    """Checks that a sampler that takes turns with its trainer uses no other GPUs."""
    ours, theirs = section.gpus, trainer.gpus
    if not set(ours) <= set(theirs) or section.workers.gpus_needed > trainer.workers.gpus_needed:
        raise SetupError(
            f"base model {section.base!r}: {section.name}.sleep is true, so the sampler uses GPUs of the trainer, but "
            f"{section.name}.devices is {ours} (it needs {section.workers.gpus_needed}) and {trainer.name}.devices is "
            f"{theirs} (it needs {trainer.workers.gpus_needed}); name GPUs of the trainer, or leave both lists out"
        )


def _shares(settings: Settings) -> defaultdict[int, dict[str, float]]:
    """The memory shares of each named GPU, by their settings. GPUs of other machines do not count."""
    shares: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for section in _sections(settings):
        for gpus in () if section.elsewhere else section.copies():
            _take(shares, section, gpus)
    return shares


def _take(shares: defaultdict[int, dict[str, float]], section: _Section, gpus: Sequence[int]) -> None:
    name = f"{section.name}.memory_share of {section.base!r}"
    for gpu in gpus:
        shares[gpu][name] = shares[gpu].get(name, 0.0) + section.share


def _without_hostfiles(settings: Settings, visible: Sequence[int]) -> Sequence[int]:
    """Leaves out the GPUs that ranks of a hostfile use on each of its hosts: this machine may be one."""
    spread = [section for section in _sections(settings) if section.elsewhere]
    for base, name, workers, _ in spread:
        if not workers.devices:
            raise SetupError(
                f"base model {base!r}: the ranks of {name}.hostfile may use GPUs of this machine too; name their GPUs "
                f"in {name}.devices, or name `devices` for every other worker here, so that no worker is given theirs"
            )
    ranks = {gpu for section in spread for gpus in section.copies() for gpu in gpus}
    return [gpu for gpu in visible if gpu not in ranks]


def _free(section: _Section, visible: Sequence[int], taken: defaultdict[int, dict[str, float]]) -> list[list[int]]:
    """Takes GPUs for each copy of a section."""
    needed, share = section.workers.gpus_needed, section.share
    copies = []
    for _ in range(section.workers.count):
        used = {gpu: sum(taken[gpu].values()) for gpu in visible}
        with_room = sorted((gpu for gpu in visible if used[gpu] + share <= 1 + _ROUNDING), key=used.__getitem__)
        if len(with_room) < needed:
            raise SetupError(_too_few(section, visible, taken))
        _take(taken, section, with_room[:needed])
        copies.append(sorted(with_room[:needed]))
    return copies


def _too_few(section: _Section, visible: Sequence[int], taken: Mapping[int, dict[str, float]]) -> str:
    base, name, workers, _ = section
    held = "; ".join(f"GPU {gpu} has {_parts(taken[gpu]) or 'all free'}" for gpu in visible)
    return (
        f"base model {base!r}: no room on this machine's GPUs for {name} (count = {workers.count}, GPUs for each: "
        f"{workers.gpus_needed}, memory_share = {workers.gpu_share:g}): {held}; to share a GPU, lower memory_share of "
        "its workers to 1 in all, such as 0.45 for trainer and sampler; to use the CPU, set CUDA_VISIBLE_DEVICES to ''"
    )


def _parts(named: Mapping[str, float]) -> str:
    return ", ".join(f"{share:g} by {name}" for name, share in named.items())


def _with_devices(base: BaseModelSettings, placed: Mapping[tuple[str, str], list[list[int]]]) -> BaseModelSettings:
    update = {
        name: workers.model_copy(update={"devices": tuple(map(tuple, placed[base.name, name]))})
        for name, workers in base.workers.items()
        if (base.name, name) in placed
    }
    return base.model_copy(update=update)
