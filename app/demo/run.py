"""Runs `tinsmith demo` from start to end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path

from app.demo import model

_PACKAGES = ("tinker", "matplotlib", "deepspeed", *model.PACKAGES)
_BUDGET_S = 300.0


def demo(data_dir: Path) -> None:
    """Runs the demo. Raises SetupError when a package is missing, SystemExit when the stack does not start."""
    model.check_packages(_PACKAGES)
    # The tokenizer is in the data folder; nothing is fetched.
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")
    # On a busy machine, threads that spin while they wait make a step several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # A failure raises an exception; the libraries' hints do not help the reader of a demo.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    # A plain SIGTERM would skip the `finally` that stops the stack.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    _run(data_dir)


def _run(data_dir: Path) -> None:
    started = time.monotonic()
    _say("Starting a stack for the demo")
    from app.demo import stack

    with stack.running(data_dir) as running:
        _say(f"Ready at {running.url} after {time.monotonic() - started:.0f} s")
        # These take seconds. A stack that cannot start says so without them.
        import tinker

        from app.demo import report, training

        with tinker.ServiceClient(base_url=running.url, api_key=running.api_key) as service:
            client = service.create_lora_training_client(model.NAME, rank=training.RANK, seed=0).result()
            tokenizer = client.get_tokenizer()
            asked = time.monotonic()
            _say(f"Asking {model.NAME} three questions")
            base = service.create_sampling_client(base_model=model.NAME).result()
            before = training.answers(base, tokenizer)
            # Saving, loading and asking again take up to twice as long as asking takes now.
            reserve_s = 2 * (time.monotonic() - asked)
            _say("Fine-tuning it on the conversations")
            losses = training.fine_tune(client, tokenizer, started + _BUDGET_S - reserve_s)
            _say("Saving a checkpoint and the adapter")
            checkpoint = client.save_state("demo").result().path
            adapter = client.save_weights_for_sampler("demo").result().path
            _say("Asking the fine-tuned model the same questions")
            tuned = service.create_sampling_client(model_path=adapter).result()
            after = training.answers(tuned, tokenizer)
        report.print_answers(before, after)
        report.print_parts(running.parts())
    result = report.Result(running.url, before, after, losses, checkpoint, adapter, time.monotonic() - started)
    report.save_picture(losses, running.data_dir / "loss.png")
    result.save(running.data_dir / "demo.json")
    report.print_end(result, running.data_dir)


def _say(line: str) -> None:
    print(line, flush=True)
