"""The forkserver of a process that runs tests. It does the slow imports of all suites, so that its forks start at once.

A process has one forkserver, and modules that are named after its start count for nothing: the suites share one list.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

import torch

_OF_ALL = [
    *("__main__", "tests.faults.worker_process", "workers.backends.training.backends", "app.stores.objects.s3"),
    *("celery.bin.celery", "tests.frozen"),
]
_OF_RANKS = [
    *("deepspeed", "safetensors.torch", "torch.distributed.tensor"),
    "deepspeed.runtime.zero.muon.original_muon",  # what ZeRO up to stage 2 imports, and with it torch's compiler
    *("transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3"),
]


def context() -> ForkServerContext:
    """Returns the context of multiprocessing whose processes are such forks."""
    found = multiprocessing.get_context("forkserver")
    # DeepSpeed asks for GPUs when it is imported, and a process that has done so cannot use them in its forks.
    found.set_forkserver_preload(_OF_ALL if torch.cuda.is_available() else [*_OF_ALL, *_OF_RANKS])
    return found
