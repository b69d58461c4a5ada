"""`python -m tests.soak [--minutes 60] [--week]`: sessions start and end, and no measurement may grow.

With `--week`, a week passes on the state server's clock meanwhile, and processes die (week.py). The exit code is 1 when
a measurement grows, or a client of the week gets anything else than an undisturbed one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import shutil
import signal
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tinker
from tinker import types

from ops.bench import machine
from tests.contract.data import sentences, train
from tests.contract.stack import API_KEY, BASE, Stack, running
from tests.models import tiny_qwen3
from tests.servers import free_port
from tests.soak import week
from tests.soak.clock import Clock
from tests.soak.measure import judge, measure

_RESULTS = Path(__file__).parent / "results"
_SCRATCH = Path("data")
_SEED = 1
_CLIENTS = 2
_SAMPLES_A_RUN = 60
# At a steady rate: the API keeps a closed client's connections for 75 s, so their number follows the rate.
_SESSION_EVERY_S = 5.0
# Temporary data must reach its end of life within the run, or everything would seem to grow.
_SHORT_LIVED = """
[engine]
result_read_s = 20
result_unread_s = 20
retain_s = 20.0
session_s = 60.0
orphan_s = 1440.0
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    minutes: float = arguments.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise the stack would outlive this process
    os.environ["TINKER_TELEMETRY"], os.environ["HF_HUB_OFFLINE"] = "0", "1"
    warnings.filterwarnings("ignore", message="DEPRECATED", category=FutureWarning)
    logging.getLogger("tinker").setLevel(logging.ERROR)
    name, run = ("week", _pass_week) if arguments.week else ("soak", _soak)
    command = ("python", "-m", "tests.soak", "--minutes", f"{minutes:g}", *(["--week"] if arguments.week else []))
    surroundings = machine.surroundings(shlex.join(command))
    folder = (_SCRATCH / name).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    print(f"logs in {folder}", file=sys.stderr, flush=True)
    content = run(folder, minutes)
    series, faults = content["series"], judge(content["series"])
    ok = not faults and not content.get("faults")
    text = json.dumps({"ok": ok, "grew": faults, "minutes": minutes, **content, **surroundings}, indent=2) + "\n"
    (folder / "report.json").write_text(text)
    for series_name, values in series.items():
        print(f"{series_name:24} {values[0]:>14,.0f} {values[-1]:>14,.0f}  {faults.get(series_name, '')}")
    print(*content.get("faults", []), sep="\n")
    if minutes >= 60 and ok:
        _RESULTS.mkdir(exist_ok=True)
        (_RESULTS / f"{name}.json").write_text(text)
    return 0 if ok else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Serve sessions, and watch what grows.")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long; the published figures are of 60")
    parser.add_argument("--week", action="store_true", help="with a week on the state server's clock, and with kills")
    return parser.parse_args(argv)


def _soak(folder: Path, minutes: float) -> dict[str, Any]:
    base = tiny_qwen3(folder / "base")
    made = Stack(folder / "data", base, free_port(), 'backend = "torch"', 'backend = "transformers"', _SHORT_LIVED)
    with running(made):
        sessions, series = soak(made, minutes)
    return {"sessions": sessions, "series": series}


def _pass_week(folder: Path, minutes: float) -> dict[str, Any]:
    base = tiny_qwen3(folder / "base")
    clock = Clock(folder)
    with running(week.stack(folder, base, clock)) as made:
        return asdict(week.Week(made, clock, _SEED, week.form(minutes)).run())


def soak(stack: Stack, minutes: float) -> tuple[int, dict[str, list[float]]]:
    """Number of served sessions, and the series measured meanwhile."""
    over = threading.Event()
    series: dict[str, list[float]] = defaultdict(list)
    with ThreadPoolExecutor(_CLIENTS) as pool:
        clients = [pool.submit(_sessions, stack, seed, over) for seed in range(_CLIENTS)]
        try:
            for _ in range(_SAMPLES_A_RUN):
                time.sleep(minutes)  # a sixtieth of the run, in seconds
                for name, value in measure(stack).items():
                    series[name].append(value)
        finally:
            over.set()
        return sum(client.result() for client in clients), dict(series)


def _sessions(stack: Stack, seed: int, over: threading.Event) -> int:
    count = 0
    while not over.is_set():
        next_at = time.monotonic() + _SESSION_EVERY_S
        _session(stack, seed)
        count += 1
        over.wait(next_at - time.monotonic())
    return count


def _session(stack: Stack, seed: int) -> None:
    """Creates a model, trains, samples, saves, deletes, finishes."""
    prompt = types.ModelInput.from_ints(sentences(1, seed=seed)[0])
    with stack.client() as service:
        client = service.create_lora_training_client(base_model=BASE, rank=4, seed=seed).result()
        train(client, 3)
        sampler = client.save_weights_and_get_sampling_client().result()
        sampler.sample(prompt, 2, types.SamplingParams(max_tokens=8, seed=seed)).result()
        path = client.save_state("kept").result().path
        train(client, 2)
    rest = tinker.RestClient(base_url=stack.url, api_key=API_KEY)
    rest.delete_checkpoint_from_tinker_path(path).result()


if __name__ == "__main__":
    sys.exit(main())
