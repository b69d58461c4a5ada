"""`python -m ops.containers.trial`: checks that the running stack does what docs/containers.md says, through kills.

It runs in the network where the containers' ports are published. Every printed line is kept in
ops/containers/results/compose-train.log.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import minio
import numpy as np
import tinker

from app.stack import ports
from ops.containers import client, engine, stack
from ops.containers.client import Played
from ops.containers.engine import Engine
from ops.containers.shell import FOLDER, ROOT, wait_until

_LOG = Path(__file__).with_name("results") / "compose-train.log"
OURS = ("api", "flower", "trainer", "sampler")
KILLED = ("redis", "broker", "minio", "api", "trainer", "sampler", "flower")
_ABOUT = '{{.Names}}: {{.Image}}{{with .Label "stand-in"}} (its stand-in: {{.}}){{end}}, {{.Status}}'
_KILLED_AFTER = 5
_PROJECT = f"label=com.docker.compose.project={stack.PROJECT}"
# Prints Linux' view of every process of the container, and if its files are writable.
_LOOK = """
import glob, json, os
names = ("Uid", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
found = []
for path in glob.glob("/proc/[0-9]*/status"):
    lines = dict(line.rstrip().split(":\\t", 1) for line in open(path) if ":\\t" in line)
    found.append([lines[name].split("\\t")[0] for name in names])
refused = []
for folder in ("/", "/etc", "/opt/tinsmith"):
    try:
        open(os.path.join(folder, "written"), "w")
    except OSError as error:
        refused.append(error.strerror)
print(json.dumps([found, refused]))
"""
# Prints the rank of every rank process, and kills the second one on request.
_RANKS = r"""
import glob, os, sys
for path in glob.glob("/proc/[0-9]*/environ"):
    variables = dict(pair.split("=", 1) for pair in open(path).read().split("\0") if "=" in pair)
    if "RANK" in variables and "workers.trainer" in open(path.replace("environ", "cmdline")).read():
        print(variables["RANK"])
        if variables["RANK"] == "1" and "kill" in sys.argv:
            os.kill(int(path.split("/")[2]), 9)
"""


class Trial:
    """One run of all checks. Each broken promise raises AssertionError."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._started = time.monotonic()

    def run(self) -> None:
        self._about()
        self._confined()
        expected = self._reference()
        self._handed_over()
        with self._killer() as kill:
            for service in KILLED:
                self._killed(service, service, expected, kill)
        self._restarted(expected)
        self._second_trainer(expected)
        self._ranks(expected)
        self._note("everything was as promised")

    def _about(self) -> None:
        docker = self._engine.docker("version", "--format", "{{.Server.Version}}")
        compose = self._engine.docker("compose", "version", "--short")
        self._note(f"{time.strftime('%Y-%m-%d')} make compose-train; {platform.platform()}, {os.cpu_count()} CPUs")
        self._note(f"Docker {docker}, Compose {compose}, SDK {tinker.__version__}")
        for line in self._engine.docker("ps", "--format", _ABOUT).splitlines():
            self._note(line)

    def _confined(self) -> None:
        for service in OURS:
            found, refused = json.loads(self._in(service, _LOOK))
            nothing = "0000000000000000"
            for uid, *capabilities, no_new_privileges, seccomp in found:
                assert uid == "10001", f"{service} runs as {uid}"
                assert capabilities == [nothing] * 3, f"{service} has capabilities {capabilities}"
                assert (no_new_privileges, seccomp) == ("1", "2"), service
            assert refused == ["Read-only file system"] * 3, f"{service}: {refused}"
            self._note(
                f"{service}: {len(found)} processes, uid 10001, no capabilities, NoNewPrivs, seccomp, read-only root"
            )

    def _reference(self) -> Played:
        played = client.play()
        first, last = played.losses[0], played.losses[-1]
        assert last < 0.9 * first, f"the loss went from {first} to {last}"
        assert played.samples[:2] != played.samples[2:], "later weights sample the same as earlier ones"
        self._note(f"{client.STEPS} steps of training, loss {first:.2f} -> {last:.2f}")
        stored = [name for name in self._stored() if f"{played.run}/weights/half/" in name]
        assert stored, f"{played.checkpoint} is not in the bucket"
        self._note(f"checkpoint saved and loaded, {len(stored)} files of it in the bucket")
        with client.connect() as service:
            training = client.create(service)
            client.train(training)
            self._note(f"downloaded by signed URLs from the object store: {client.download(training)}")
        return played

    def _handed_over(self) -> None:
        """Without an object store, new weights can reach the sampler through shared memory alone."""
        with client.connect() as service:
            training = client.create(service)
            client.train(training)
            self._compose("stop", "minio")
            client.train(training)
            samples = client.sample(training.save_weights_and_get_sampling_client().result(300))
            held = self._in("sampler", "import os; print(*os.listdir('/handover'))")
            self._compose("start", "minio")
            assert training.model_id in held, f"the hand-over volume holds {held!r}"
            assert samples
        self._healthy("minio")
        self._note("with the object store stopped, the sampler used new weights: they came through /handover")

    def _killed(self, what: str, service: str, expected: Played, kill: Callable[[str], object]) -> None:
        """Ends the service's container with `kill` while a client trains. The results must be those `expected`."""
        reached = threading.Event()
        steps: list[int] = []

        def after_step(step: int) -> None:
            steps.append(step)
            if step == _KILLED_AFTER:
                reached.set()

        results: list[Played] = []
        playing = threading.Thread(target=lambda: results.append(client.play(after_step)))
        started = time.monotonic()
        playing.start()
        reached.wait(600)
        container = self._container(service)
        before = self._pid(container)
        kill(container)
        killed_at = len(steps)
        assert killed_at < client.STEPS, "the run ended before the kill"
        playing.join(900)
        assert results, f"{what} was killed, and the client got no result"
        assert results[0] == expected, f"{what} was killed and the results differ"
        wait_until(f"a new process of {service}", lambda: self._pid(container) not in (0, before))
        self._healthy(service)
        self._note(
            f"{what} killed (SIGKILL) after step {killed_at} of {client.STEPS}: started again by Docker, "
            f"same losses, samples and scores to the bit, {time.monotonic() - started:.0f} s in all"
        )

    def _restarted(self, expected: Played) -> None:
        self._compose("down")
        assert not self._engine.docker("ps", "--all", "--quiet", "--filter", _PROJECT), "down left containers"
        stack.up()
        with client.connect() as service:
            runs = client.rest().list_training_runs(limit=100).result().training_runs
            assert expected.run in {run.training_run_id for run in runs}
            assert client.score_from(service, expected.checkpoint) == expected.scores
            assert client.sample_from(service, expected.weights) == expected.samples[2:]
        self._note("down and up again: run, checkpoint and weights are still there, and score and sample the same")

    def _second_trainer(self, expected: Played) -> None:
        stack.up((stack.SECOND_TRAINER,))
        with client.connect() as service:
            clients = [client.create(service) for _ in range(8)]
            losses = [[client.train(training) for _ in range(3)] for training in clients]
            assert losses == [expected.losses[:3]] * len(clients)
            said = self._engine.logs("tinsmith-trainer-1")
            mine = [training for training in clients if training.model_id in said]
            assert 0 < len(mine) < len(clients), f"the second trainer has {len(mine)} of {len(clients)} runs"
            self._note(f"a second trainer: of {len(clients)} runs it has {len(mine)}, all with the same losses")
            self._engine.docker("kill", "tinsmith-trainer-1")
            assert [client.train(training) for training in mine] == [expected.losses[3]] * len(mine)
        self._note("the second trainer killed and not restarted: the first continues its runs, with the same bits")
        self._compose("up", "--detach", "--no-build", "--remove-orphans")

    def _ranks(self, expected: Played) -> None:
        stack.up((two_ranks(),))
        ranks = self._in("trainer", _RANKS).split()
        assert set(ranks) == {"0", "1"}, f"ranks: {ranks}"
        played = client.play()
        np.testing.assert_allclose(played.losses, expected.losses, rtol=1e-3)
        self._note("ranks = 2: two processes train together, with the losses of one")
        self._killed("rank 1", "trainer", played, lambda _: self._in("trainer", _RANKS, "kill"))

    @contextmanager
    def _killer(self) -> Iterator[Callable[[str], object]]:
        """Kills a container's first process from outside, like a crash.

        After `docker kill` Docker does not restart the container.
        """
        name = f"{stack.PROJECT}-killer"
        options = ["--rm", "--pid=host", "--user=0", "--security-opt=apparmor=unconfined", f"--name={name}"]
        image = self._engine.docker("inspect", "--format", "{{.Config.Image}}", self._container("redis"))
        self._engine.docker("run", "--detach", *options, image, "sleep", "infinity")
        try:
            yield lambda container: self._engine.docker("exec", name, "sh", "-c", f"kill -9 {self._pid(container)}")
        finally:
            self._engine.docker("rm", "--force", name)

    def _compose(self, *arguments: str) -> None:
        stack.compose(self._engine, *arguments)

    def _container(self, service: str) -> str:
        label = f"label=com.docker.compose.service={service}"
        return self._engine.docker("ps", "--all", "--quiet", "--filter", label, "--filter", _PROJECT)

    def _pid(self, container: str) -> int:
        return int(self._engine.docker("inspect", "--format", "{{.State.Pid}}", container))

    def _healthy(self, service: str) -> None:
        def is_healthy() -> bool:
            return self._engine.docker("inspect", "--format", "{{.State.Health.Status}}", container) == "healthy"

        container = self._container(service)
        wait_until(f"{service} healthy", is_healthy)

    def _in(self, service: str, program: str, *arguments: str) -> str:
        return self._engine.docker("exec", self._container(service), "python", "-c", program, *arguments)

    def _stored(self) -> list[str]:
        """Names of all objects in the bucket."""
        keys = stack.secret("MINIO_ROOT_USER"), stack.secret("MINIO_ROOT_PASSWORD")
        store = minio.Minio("localhost:9000", *keys, secure=False)
        return [str(found.object_name) for found in store.list_objects("tinsmith", recursive=True)]

    def _note(self, line: str) -> None:
        text = f"{time.monotonic() - self._started:7.1f} s  {line}"
        print(text, flush=True)
        with _LOG.open("a") as log:
            log.write(f"{text}\n")


def two_ranks() -> Path:
    """Writes an override of docker-compose.yml with other settings, different in one line."""
    settings = (ROOT / "ops" / "docker" / "tinsmith.toml").read_text()
    section = "[base_models.trainer]\n"
    (FOLDER / "ranks.toml").write_text(settings.replace(section, f"{section}ranks = 2\n"))
    mounted = [f"{FOLDER / 'ranks.toml'}:/etc/tinsmith/tinsmith.toml:ro"]
    override = FOLDER / "ranks.yml"
    override.write_text(json.dumps({"services": {name: {"volumes": mounted} for name in OURS}}))
    return override


def main() -> None:
    os.environ.update(ports.without_proxy(os.environ))
    running = engine.running()
    assert running, "no stack is up: `make compose-train` starts one"
    _LOG.parent.mkdir(exist_ok=True)
    _LOG.unlink(missing_ok=True)
    Trial(running).run()


if __name__ == "__main__":
    main()
