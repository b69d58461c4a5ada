"""`tinsmith demo` from start to end."""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from app import demo_model
from app.errors import SetupError

_NEEDED = ("tinker", "tqdm", "matplotlib", "transformers")


def demo(data_dir: Path) -> None:
    """Raises SetupError when a package is missing or the stack does not start."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise SetupError(f"the demo needs {', '.join(missing)}: run `make setup`")
    # The tokenizer lies in the data folder; nothing is fetched.
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    # A plain SIGTERM would skip the `finally` that stops the stack.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    _run(data_dir)


def _run(data_dir: Path) -> None:
    import tinker

    from app.demo import report, stack, training

    started = time.monotonic()
    print("Starting the stack", flush=True)
    with stack.running(data_dir) as running:
        print(f"Ready at {running.url} after {time.monotonic() - started:.0f} s", flush=True)
        with tinker.ServiceClient(base_url=running.url, api_key=running.api_key) as service:
            client = service.create_lora_training_client(demo_model.NAME, rank=training.RANK).result()
            tokenizer = client.get_tokenizer()
            base = service.create_sampling_client(base_model=demo_model.NAME).result()
            before = training.answers(base, tokenizer)
            losses = training.fine_tune(client, tokenizer)
            checkpoint = client.save_state("demo").result().path
            adapter = client.save_weights_for_sampler("demo").result().path
            tuned = service.create_sampling_client(model_path=adapter).result()
            after = training.answers(tuned, tokenizer)
        report.print_answers(before, after)
        report.print_parts(running.parts())
    picture = data_dir / "loss.png"
    report.save_picture(losses, picture)
    print(f"\nLoss of an answer's token (nats) in {len(losses)} steps; picture: {picture}\n{report.chart(losses)}")
    print(f"\nTo go on training:  {checkpoint}\nTo sample from:     {adapter}")
    print(f"All of it took {time.monotonic() - started:.0f} s. {_next_steps(data_dir)}")


def _next_steps(data_dir: Path) -> str:
    return (
        f"Where to look next:\n  tinsmith up --data-dir {data_dir}     the same stack again, with these checkpoints\n"
        f"  {data_dir}/api-key, {data_dir}/logs     its key and what its processes said\n"
        "  app/demo/training.py, README.md     the SDK calls behind this, and how to serve your own model"
    )
