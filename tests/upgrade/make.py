"""Make the fixture of a commit: `python -m tests.upgrade.make COMMIT` runs its code, uses it, and kills it at work.

Redis keys are spelt out here: they are what no commit may change.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import redis
import tinker
from tinker import types

from tests.contract.awaiting import await_true
from tests.contract.data import ADAM, datum, policy, sentences, supervised, train
from tests.contract.stack import API_KEY, BASE, Stack, code_of, running
from tests.custom_losses import DPO_RANKS, dpo
from tests.models import tiny_qwen3
from tests.upgrade import fixture
from tests.upgrade.fixture import Asked, Run
from tests.upgrade.recorder import Recorder, recording
from tests.upgrade.tree import exported

# 20 thousand weights; a fixture holds them many times.
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
_PREFIX = "tinsmith:"
_LISTS = ("/api/v1/checkpoints?limit=100", "/api/v1/training_runs?limit=100")
_SNAPSHOT_AGE_S = 11.0
# Ten years, the maximum.
_TTL_S = 315_360_000
# Size of a chunk; see fwdbwd_max_chunk_len in the SDK.
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Scene:
    stack: Stack
    recorder: Recorder
    service: tinker.ServiceClient
    state: redis.Redis

    def head(self, model_id: str, name: str) -> int:
        return int(self.state.hget(f"{_PREFIX}models:{model_id}", name) or 0)

    def acknowledged(self, what: Callable[[], object], calls: int) -> None:
        """Runs `what`, and waits until so many more calls are acknowledged."""
        before = len(self.recorder.calls)
        what()
        await_true(lambda: len(self.recorder.calls) >= before + calls, f"{calls} more acknowledged calls")

    def signal(self, number: signal.Signals, *names: str) -> None:
        """Signals all processes of the stack's children with that name."""
        assert self.stack.process is not None
        for child in psutil.Process(self.stack.process.pid).children(recursive=True):
            if any(name in " ".join(child.cmdline()) for name in names):
                child.send_signal(number)


def make(commit: str, folder: Path) -> Asked:
    """Leaves `data`, `base` and `asked.json` in the folder."""
    tiny_qwen3(folder / "base", **_SIZES)
    stack = fixture.stack(folder, exported(commit))
    with running(stack), recording(stack.url) as recorder, _state(stack) as state:
        # The client is never closed: its session goes on.
        service = tinker.ServiceClient(base_url=recorder.url, api_key=API_KEY)
        scene = Scene(stack, recorder, service, state)
        asked = _use(commit, scene)
        _kill(stack)
    fixture.write(folder, asked)
    return asked


def _use(commit: str, scene: Scene) -> Asked:
    key = _tenant(scene.stack)
    lora = scene.service.create_lora_training_client(base_model=BASE, rank=8, seed=2).result()
    plain = scene.service.create_lora_training_client(base_model=BASE, rank=4, seed=1).result()
    full = scene.service.create_lora_training_client(base_model=BASE, rank=0).result()
    handle = scene.service.create_custom_loss(dpo, input_ranks=DPO_RANKS).result()
    time.sleep(_SNAPSHOT_AGE_S)
    runs = {
        "loaded": _loaded(scene, lora),
        "snapshotted": _snapshotted(scene, plain),
        "full": _snapshotted(scene, full),
    }
    # The calls from here on come after the snapshots, and are replayed.
    lora.forward_backward(policy(), "importance_sampling").result()
    lora.optim_step(ADAM).result()
    for client in (lora, plain, full):
        client.forward_backward(supervised(seed=5), "cross_entropy").result()
    samplers = _samplers(scene, lora, runs["loaded"])
    await_true(lambda: not scene.state.zcard(f"{_PREFIX}index:handovers"), "all weights are uploaded")
    listed = {path: _get(scene.stack, path) for path in _LISTS}

    stopped_in = _stop_in_the_middle(scene, lora)
    scene.signal(signal.SIGSTOP, "full-trainer-", "sampler-")
    _leave_waiting(scene, lora, plain, full, handle, runs["snapshotted"], samplers)
    runs["young"] = Run(_young(scene), "", 0)
    _check(scene, runs, stopped_in)
    return Asked(commit, scene.recorder.calls, runs, listed, key, stopped_in)


def _loaded(scene: Scene, client: tinker.TrainingClient) -> Run:
    """A load makes a snapshot at once, so that replay begins at the checkpoint."""
    train(client, 2)
    kept = client.save_state("kept", user_metadata={"of": "an upgrade"}).result().path
    client.load_state_with_optimizer(kept).result()
    since = scene.head(client.model_id, "applied")
    await_true(lambda: scene.head(client.model_id, "snapshot_seq") == since, "the load's snapshot")
    rest = tinker.RestClient(base_url=scene.stack.url, api_key=API_KEY)
    rest.publish_checkpoint_from_tinker_path(kept).result()
    return Run(client.model_id, kept, since)


def _snapshotted(scene: Scene, client: tinker.TrainingClient) -> Run:
    """The first step of a model that is ten seconds old makes a snapshot."""
    train(client, 1)
    since = scene.head(client.model_id, "applied")
    kept = client.save_state("kept").result().path
    await_true(lambda: scene.head(client.model_id, "snapshot_seq") == since, "the step's snapshot")
    return Run(client.model_id, kept, since + 1)


def _samplers(scene: Scene, client: tinker.TrainingClient, run: Run) -> list[tinker.SamplingClient]:
    """Samplers of a named checkpoint, of weights without a name, and of the base model; each has sampled."""
    path = client.save_weights_for_sampler("kept", ttl_seconds=_TTL_S).result().path
    found = [
        scene.service.create_sampling_client(path).result(),
        client.save_weights_and_get_sampling_client().result(),
        client.save_weights_and_get_sampling_client(kind="inflight").result(),
        scene.service.create_sampling_client(base_model=BASE).result(),
    ]
    for sampler in found:
        _sample(sampler, 1).result()
    return found


def _sample(client: tinker.SamplingClient, seed: int) -> Any:
    params = types.SamplingParams(max_tokens=6, temperature=0.9, top_p=0.95, seed=seed, stop=[])
    prompt = types.ModelInput.from_ints(sentences(1, seed=seed)[0])
    return client.sample(prompt, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2)


def _stop_in_the_middle(scene: Scene, client: tinker.TrainingClient) -> str:
    """Stops the trainer while it runs a call of the client's, and returns that call.

    The call is large enough to be stopped in the middle, and to be kept in the object store.
    """
    rows = [datum([3 + number % 7] * 60) for number in range(200)]
    while True:
        scene.acknowledged(lambda: client.forward_backward(rows, "cross_entropy").future(), 1)
        request = scene.recorder.calls[-1].request_id
        await_true(lambda request=request: scene.state.hget(f"{_PREFIX}op:{request}", "runner"), "it is begun")
        scene.signal(signal.SIGSTOP, "trainer-")
        if _is_pending(scene, request):
            return request
        scene.signal(signal.SIGCONT, "trainer-")


def _is_pending(scene: Scene, request: str) -> bool:
    return scene.state.hget(f"{_PREFIX}future:{request}", "state") == b"pending"


def _leave_waiting(
    scene: Scene,
    lora: tinker.TrainingClient,
    plain: tinker.TrainingClient,
    full: tinker.TrainingClient,
    handle: Any,
    snapshotted: Run,
    samplers: list[tinker.SamplingClient],
) -> None:
    """Leaves calls of every kind waiting. The first is in two chunks, of which the SDK sends the second first."""
    chunked = [datum([3, 4, 5]) for _ in range(_CHUNK + 6)]
    rewarded = [datum(row, target_tokens=np.array(row), **_pair(row)) for row in sentences(3, seed=6)]

    def train_on(client: tinker.TrainingClient, loss: str) -> None:
        client.forward_backward(policy(seed=7), loss)
        client.optim_step(ADAM)

    scene.acknowledged(lambda: lora.forward_backward(chunked, "cross_entropy"), 2)
    scene.acknowledged(lambda: lora.optim_step(ADAM), 1)
    scene.acknowledged(lambda: lora.forward_backward_custom(rewarded, handle), 1)
    scene.acknowledged(lambda: train_on(lora, "ppo"), 2)
    scene.acknowledged(lambda: lora.forward(supervised(seed=9), "cross_entropy"), 1)
    scene.acknowledged(lambda: lora.save_state("waited", ttl_seconds=_TTL_S), 1)
    scene.acknowledged(lambda: lora.save_weights_for_sampler("waited"), 1)
    scene.acknowledged(lambda: lora.save_weights_external("taken-home"), 1)

    scene.acknowledged(lambda: train_on(plain, "dro"), 2)
    scene.acknowledged(lambda: plain.save_state("waited"), 1)
    scene.acknowledged(lambda: plain.load_state_with_optimizer(snapshotted.kept), 1)
    scene.acknowledged(lambda: train_on(plain, "cispo"), 2)
    # Its gradient still waits for a step when all waiting calls are done.
    scene.acknowledged(lambda: plain.forward_backward(supervised(seed=10), "cross_entropy"), 1)

    scene.acknowledged(lambda: train_on(full, "importance_sampling"), 2)
    scene.acknowledged(lambda: full.save_state("waited"), 1)
    for sampler in samplers:
        scene.acknowledged(lambda sampler=sampler: _sample(sampler, 2), 1)


def _pair(row: list[int]) -> dict[str, Any]:
    """The inputs of dpo."""
    half = np.arange(len(row)) < len(row) // 2

    def column(values: Any) -> types.TensorData:
        array = np.asarray(values, np.float32)
        return types.TensorData(data=array.ravel().tolist(), dtype="float32", shape=list(array.shape))

    return {"chosen": column(half), "rejected": column(~half), "reference": column(0.5)}


def _young(scene: Scene) -> str:
    """Its client waits for the model to be made, in a thread that ends with this process."""
    create = threading.Thread(
        target=lambda: scene.service.create_lora_training_client(base_model=BASE, rank=4, seed=4).result(), daemon=True
    )
    scene.acknowledged(create.start, 1)
    call = scene.recorder.calls[-1]
    return str(call.answer["model_id"]) if "model_id" in call.answer else call.request_id


def _check(scene: Scene, runs: dict[str, Run], stopped_in: str) -> None:
    """Checks that a reference is exact on another machine too: the only snapshot is that of the kept state."""
    assert _is_pending(scene, stopped_in)
    for run in runs.values():
        snapshot = scene.head(run.model_id, "snapshot_seq")
        assert run.since - 1 <= snapshot <= run.since, f"{run} has a snapshot at {snapshot}"


def _tenant(stack: Stack) -> str:
    """Key of a member of an organisation's project."""
    organisation = _admin(stack, "org", "create", "Tinkers")
    project = _admin(stack, "project", "create", "kettles", "--org", organisation)
    user = _admin(stack, "user", "create", "member@example.org", "--org", organisation)
    _admin(stack, "user", "role", user, project, "member")
    return _admin(stack, "key", "create", "--user", user)


def _admin(stack: Stack, *arguments: str) -> str:
    command = [sys.executable, "-m", "app.cli", "admin", *arguments, "--data-dir", str(stack.data_dir)]
    environment = {**os.environ, **code_of(stack.tree)}
    return subprocess.check_output(command, cwd=stack.tree, env=environment, text=True).strip()


def _get(stack: Stack, path: str) -> Any:
    request = urllib.request.Request(stack.url + path, headers={"X-API-Key": API_KEY})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


@contextmanager
def _state(stack: Stack) -> Iterator[redis.Redis]:
    with stack.redis() as client:
        yield client


def _kill(stack: Stack) -> None:
    """Kills all at once, so that nothing ends properly: the supervisor first, because it would restart the others."""
    assert stack.process is not None
    supervisor = psutil.Process(stack.process.pid)
    everything = [supervisor, *supervisor.children(recursive=True)]
    for process in everything:
        process.kill()
    psutil.wait_procs(everything, 60)
    stack.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--to", type=Path, default=fixture.FIXTURES, help="the folder for the archive")
    arguments = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-upgrade-"))
    try:
        asked = make(arguments.commit, folder)
        archive = arguments.to / f"{arguments.commit}.tar.xz"
        fixture.pack(folder, archive)
        size = archive.stat().st_size
        print(f"{archive}: {size / 1e6:.2f} MB, {len(asked.answered)} calls answered, {len(asked.waiting)} waiting")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    # The SDK's threads still wait for the results.
    os._exit(0)


if __name__ == "__main__":
    main()
