"""The command lines of `python -m workers.trainer` and `python -m workers.sampler`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from app import malloc, settings
from app.dispatch import sample_queue, train_queue
from app.errors import SetupError
from app.settings.gpus import gpus_of_copies
from app.stack.memory import usable_cores
from workers.process import gpu_start_locks, multinode
from workers.process.startup import refuse, uncollected

# A spin is a pause instruction, of some 140 cycles on current processors.
_SPINS = "3000"


def run_trainer() -> None:
    """`python -m workers.trainer --base NAME --name NAME [--copy N] [--full]`: starts a trainer of any number of ranks.

    With one rank it is a Celery worker. With more ranks it starts itself once for each rank, under torchrun or on the
    hosts of `trainer.hostfile`; the whole group ends when one rank dies. Rank 0 is the Celery worker; the other ranks
    follow its calls.
    """
    arguments = _parse_arguments("workers.trainer", "train all of its weights, not adapters")
    malloc.share_arenas()
    spin_briefly()
    try:
        everything = settings.from_environment()
        base = _base_model(everything, arguments.base)
        if arguments.full:
            base = base.for_full()
        gpus = _gpus("full" if arguments.full else "trainer", base.trainer, arguments.copy)
        bind_gpus(gpus)
        if "RANK" not in os.environ:
            _start_ranks(everything, base.trainer, arguments.name, gpus)
        if os.environ.get("RANK", "0") != "0":
            _follow(everything, base, full=arguments.full)
        else:
            run_worker(train_queue(base.name, full=arguments.full), arguments.name, ["-P", "solo"])
        _end()
    except SetupError as error:
        refuse(arguments.name, error)


def _start_ranks(
    everything: settings.Settings, trainer: settings.TrainerSettings, name: str, gpus: Sequence[int]
) -> None:
    """Returns only when this process is the only rank."""
    if trainer.hostfile:
        command = ["workers.trainer", *sys.argv[1:]]
        sys.exit(multinode.run(trainer.slots(), everything, name, command, gpus))
    if trainer.ranks > 1:
        if gpus or gpu_start_locks.visible(os.environ):  # a container's GPUs are not named
            os.environ.setdefault("OMP_NUM_THREADS", str(_threads_each(trainer.ranks * trainer.count)))
        launcher = ["-m", "workers.process.torchrun", "--nproc-per-node", str(trainer.ranks)]
        os.execv(sys.executable, [sys.executable, *launcher, "-m", "workers.trainer", *sys.argv[1:]])
    keep_to_quota()


def _threads_each(ranks: int) -> int:
    """The cores for each of `ranks` ranks. torchrun itself would give each rank one thread."""
    return max(1, usable_cores() // ranks)


def _follow(everything: settings.Settings, base: settings.BaseModelSettings, *, full: bool) -> None:
    """Follows rank 0, which says when to stop; a signal to the whole group must not end this rank during a pass."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uncollected():
        from workers.backends.training.backends import create

        backend = create(base, full=full)
        with gpu_start_locks.starting(everything.handover_dir, gpu_start_locks.visible(os.environ), alone=False):
            backend.open()
    backend.follow()


def _end() -> NoReturn:
    from workers.backends.training import ranks

    ranks.end()


def run_sampler() -> None:
    """`python -m workers.sampler --base NAME --name NAME [--copy N] [--full]`: starts one sampler, a Celery worker with
    a thread for each request."""
    arguments = _parse_arguments("workers.sampler", "sample fully fine-tuned models, not adapters")
    malloc.share_arenas()
    spin_briefly()
    try:
        base = _base_model(settings.from_environment(), arguments.base)
        if arguments.full:
            base = base.for_full_sampler()
        bind_gpus(_gpus("full_sampler" if arguments.full else "sampler", base.sampler, arguments.copy))
        if base.sampler.backend != "vllm" and not gpu_start_locks.visible(os.environ):
            keep_to_quota()  # vLLM, which is the choice on a GPU, divides its threads itself
        concurrency = str(base.sampler.concurrency)
        queue = sample_queue(base.name, full=arguments.full)
        run_worker(queue, arguments.name, ["-P", "threads", "-c", concurrency])
    except SetupError as error:
        refuse(arguments.name, error)


def _base_model(everything: settings.Settings, name: str) -> settings.BaseModelSettings:
    base = everything.base_model(name)
    if base is None:
        names = ", ".join(each.name for each in everything.base_models) or "none"
        raise SetupError(f"the settings have no base model {name!r}; they have: {names}")
    return base


def _parse_arguments(module: str, full: str) -> argparse.Namespace:
    """The arguments of this process. `full` is the help of --full."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--base", required=True, help="name of the base model in the settings")
    parser.add_argument("--full", action="store_true", help=full)
    parser.add_argument("--name", required=True, help="name of this worker, unique among the running ones")
    parser.add_argument(
        "--copy",
        type=int,
        default=0,
        help="number of this worker among the section's `count`, from 0: it gets the GPUs of that copy",
    )
    return parser.parse_args()


def _gpus(name: str, section: settings.TrainerSettings | settings.SamplerSettings, copy: int) -> tuple[int, ...]:
    copies = gpus_of_copies(name, section.devices, section.count)
    if not 0 <= copy < len(copies):
        raise SetupError(f"--copy is {copy}, but {name}.count is {section.count}; give a number below it")
    return copies[copy]


def bind_gpus(devices: Sequence[int]) -> None:
    """Makes these GPUs the only ones that this process and its children see, in this order; none leaves all visible.

    The GPU of rank i on this machine is then number i, for torch and for DeepSpeed, which knows LOCAL_RANK alone. CUDA
    reads the variables once, so this comes before torch is imported. The numbers are those of nvidia-smi.
    """
    if devices:
        os.environ.update(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES=",".join(map(str, devices)))


def spin_briefly() -> None:
    """Makes the threads of an OpenMP loop wait for each other awake for 0.1 ms at most, and asleep after that.

    libgomp lets them spin for 14 ms. Where a trainer and a sampler share cores, they spin for a thread that the other
    process keeps from its core, so each holds up the other: a step of 1 s took 40 s and more (`make bench
    BENCH=shared_cores`). libgomp reads the variable once, so this comes before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def keep_to_quota() -> None:
    """Gives torch as many threads as the CPU quota of a container has cores, unless the user chose a number.

    torch starts a thread for each core of the machine. Under a quota the kernel stops them all once they have used it
    up, which leaves some waiting for others: two threads under a quota of one core took 1.3 to 1.5 times the time of
    one. libgomp reads the variable once, so this comes before torch is imported.
    """
    cores = usable_cores()
    if cores < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))


def run_worker(queue: str, node: str, pool: Sequence[str]) -> None:
    """Returns after the worker has shut down. Gossip and mingle carry worker-to-worker news that we do not use."""
    from workers.celery_app import app

    app.worker_main(
        ["worker", "-Q", queue, "-n", f"{node}@%h", "-l", "INFO", "--without-gossip", "--without-mingle", *pool]
    )
