"""`python -m workers.sampler --base NAME --name NAME [--full]`: one sampler: a Celery worker, a thread a request."""

from __future__ import annotations

import argparse
import os

from app import settings
from app.doorbell import sample_queue
from app.errors import SetupError
from workers.launch import run_worker
from workers.starting import refuse


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m workers.sampler")
    parser.add_argument("--base", required=True, help="name of the base model in the settings")
    parser.add_argument("--full", action="store_true", help="sample models fine-tuned in full, not adapters")
    parser.add_argument("--name", required=True, help="name of this worker, unique among the running ones")
    arguments = parser.parse_args()
    try:
        base = settings.from_environment().base_model(arguments.base)
        if base is None:
            raise SetupError(f"the settings have no base model {arguments.base!r}")
        if arguments.full:
            base = base.for_full_sampler()
        if base.sampler.devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, base.sampler.devices))
        concurrency = str(base.sampler.concurrency)
        queue = sample_queue(base.name, full=arguments.full)
        run_worker(queue, arguments.name, ["-P", "threads", "-c", concurrency])
    except SetupError as error:
        refuse(arguments.name, error)


if __name__ == "__main__":
    main()
