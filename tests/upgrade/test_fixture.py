"""The data of an earlier commit's killed stack continues under this code, to the same bits.

The reference is computed during the test, because other kinds of processors give other bits. New models load the
checkpoints that the runs kept, and receive exactly the calls that followed them, finished or waiting.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
import tinker

from tests.contract.data import supervised, train
from tests.contract.stack import API_KEY, BASE, Stack, running
from tests.upgrade import fixture
from tests.upgrade.calls import Call, Result, made, result, send
from tests.upgrade.fixture import Asked, Run
from tests.upgrade.tree import FROM

_KEPT = sorted(path.name for path in fixture.FIXTURES.glob("*.tar.xz"))
_RUNS = ("loaded", "snapshotted", "full")
_SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")


@dataclass
class Upgraded:
    """A stack of this code on an earlier one's data.

    `results` are those of the waiting calls, by request. The models of `made_here` had their first results from this
    machine.
    """

    stack: Stack
    asked: Asked
    made_here: bool
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.stack.url

    def files(self, path: str) -> dict[str, bytes]:
        """Files of a checkpoint, without its manifest, which has a time and an author."""
        with self.stack.redis() as state:
            prefix = json.loads(state.hget(f"tinsmith:checkpoints:{path}", "prefix"))
        folder = self.stack.data_dir / "objects" / prefix
        found = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "manifest.json"}
        assert found, f"{path} has no files"
        return found


@pytest.fixture(scope="module", params=[*_KEPT, *([f"{FROM} made here"] if FROM else [])])
def upgraded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upgraded]:
    folder = tmp_path_factory.mktemp("upgrade")
    made_here = request.param not in _KEPT
    if made_here:
        subprocess.check_call([sys.executable, "-m", "tests.upgrade.make", FROM, "--to", str(folder)])
    archive = folder / f"{FROM}.tar.xz" if made_here else fixture.FIXTURES / request.param
    asked = fixture.unpack(archive, folder)
    with running(fixture.stack(folder)) as stack:
        found = Upgraded(stack, asked, made_here)
        found.results = {call.request_id: result(stack.url, call.request_id) for call in asked.waiting}
        yield found


@pytest.fixture
def service(upgraded: Upgraded) -> Iterator[tinker.ServiceClient]:
    with upgraded.stack.client() as client:
        yield client


def failed(answer: Result) -> bool:
    return answer.content_type.startswith("application/json") and "error" in answer.fields


def test_the_fixture_has_calls_of_every_kind_that_wait(upgraded: Upgraded):
    kinds = {call.kind for call in upgraded.asked.waiting}
    assert kinds == {"create_model", "forward_backward", "optim_step", "load_weights", "asample", *_SAVES}
    assert upgraded.asked.stopped_in in {call.request_id for call in upgraded.asked.waiting}


def test_who_waited_gets_his_result(upgraded: Upgraded):
    assert {call.request_id for call in upgraded.asked.waiting if failed(upgraded.results[call.request_id])} == set()


def test_a_result_that_was_given_is_given_again(upgraded: Upgraded):
    answered = upgraded.asked.answered
    assert answered
    for call in answered:
        assert result(upgraded.url, call.request_id) == call.result, call.path


def test_a_repeated_call_is_the_same_call(upgraded: Upgraded):
    heads = [head(upgraded, run) for run in upgraded.asked.runs.values()]
    for call in upgraded.asked.calls:
        assert send(upgraded.url, call) == call.answer, call.path
        assert result(upgraded.url, call.request_id) == (call.result or upgraded.results[call.request_id]), call.path
    assert [head(upgraded, run) for run in upgraded.asked.runs.values()] == heads


def test_other_content_under_a_used_seq_is_refused(upgraded: Upgraded):
    call = next(call for call in upgraded.asked.answered if call.kind == "optim_step")
    other = call.changed(adam_params={"learning_rate": 0.5})
    headers = {"Content-Type": call.content_type, "X-API-Key": API_KEY}
    assert requests.post(upgraded.url + call.path, other.body, headers=headers, timeout=60).status_code == 400


def head(upgraded: Upgraded, run: Run) -> int:
    """Number of applied calls of the run."""
    with upgraded.stack.redis() as state:
        return int(state.hget(f"tinsmith:models:{run.model_id}", "applied"))


@pytest.mark.parametrize("name", _RUNS)
def test_a_run_goes_on_to_the_bits_of_one_that_was_never_upgraded(
    upgraded: Upgraded, service: tinker.ServiceClient, name: str
):
    run = upgraded.asked.runs[name]
    calls = upgraded.asked.behind(run)
    reference = service.create_training_client_from_state_with_optimizer(run.kept).result().model_id
    for seq, call in enumerate(calls, 1):
        expected = made(upgraded.url, call.to(reference, seq))
        if call.result is None:
            found = upgraded.results[call.request_id]
            assert renamed(found.body, run.model_id, reference) == expected.body, call.path
        elif upgraded.made_here:
            assert renamed(call.result.body, run.model_id, reference) in (expected.body, untyped(expected)), call.path
    saved = [call for call in calls if call.kind in _SAVES and call.result is None]
    assert saved
    for call in saved:
        path = upgraded.results[call.request_id].fields["path"]
        assert upgraded.files(path) == upgraded.files(path.replace(run.model_id, reference)), path
    assert further(upgraded, run.model_id, calls, calls[-1].seq) == further(upgraded, reference, calls, len(calls))


def untyped(found: Result) -> bytes:
    """A result as earlier commits wrote it: their JSON has no `type`."""
    if not found.content_type.startswith("application/json"):
        return found.body
    return json.dumps({name: value for name, value in found.fields.items() if name != "type"}).encode()


def renamed(body: bytes, old: str, new: str) -> bytes:
    """A result renamed to another model of another session: names of saves and samplers hold both."""
    session, other = (model_id.partition(":")[0].encode() for model_id in (old, new))
    return body.replace(old.encode(), new.encode()).replace(session, other)


def test_a_model_that_was_still_to_be_made_is_the_one_that_was_asked_for(
    upgraded: Upgraded, service: tinker.ServiceClient
):
    calls = upgraded.asked.behind(upgraded.asked.runs["loaded"])
    young = upgraded.asked.runs["young"].model_id
    same = service.create_lora_training_client(base_model=BASE, rank=4, seed=4).result().model_id
    assert further(upgraded, young, calls, 0) == further(upgraded, same, calls, 0)


def further(upgraded: Upgraded, model_id: str, calls: list[Call], seq: int) -> dict[str, Any]:
    """Results of more calls, and the weights and optimizer state at the end."""
    batches = [call for call in calls if call.kind == "forward_backward" and call.result is None]
    batch = min(batches, key=lambda call: len(call.body))
    step, save = (next(call for call in calls if call.kind == kind) for kind in ("optim_step", "save_weights"))
    found = [made(upgraded.url, call.to(model_id, seq + at)).body for at, call in enumerate((batch, step) * 2, 1)]
    path = made(upgraded.url, save.to(model_id, seq + 5, path="end")).fields["path"]
    return {"results": found, "files": upgraded.files(path)}


def test_a_sample_that_waited_is_what_a_new_one_is(upgraded: Upgraded):
    samples = [call for call in upgraded.asked.waiting if call.kind == "asample"]
    assert len(samples) == 4
    for call in samples:
        again = made(upgraded.url, call.changed(seq_id=1000))
        assert again.body == upgraded.results[call.request_id].body


def test_everything_that_was_listed_is_still_there(upgraded: Upgraded):
    for path, old in upgraded.asked.listed.items():
        new = get(upgraded, path)
        if "checkpoints" in old:
            assert all(
                any(before.items() <= now.items() for now in new["checkpoints"]) for before in old["checkpoints"]
            )
        else:
            runs = {run["training_run_id"]: run for run in new["training_runs"]}
            for before in old["training_runs"]:
                assert steady(before).items() <= runs[before["training_run_id"]].items()


def steady(run: dict[str, Any]) -> dict[str, Any]:
    """Parts of a run that no further call changes."""
    moving = {"last_request_time", "last_checkpoint", "last_sampler_checkpoint"}
    return {name: value for name, value in run.items() if name not in moving}


def get(upgraded: Upgraded, path: str, key: str = API_KEY) -> Any:
    answer = requests.get(upgraded.url + path, headers={"X-API-Key": key}, timeout=60)
    answer.raise_for_status()
    return answer.json()


def test_checkpoints_load_and_their_weights_sample(upgraded: Upgraded, service: tinker.ServiceClient):
    checkpoints = get(upgraded, "/api/v1/checkpoints?limit=100")["checkpoints"]
    kinds = {checkpoint["checkpoint_type"] for checkpoint in checkpoints}
    assert {"training", "sampler"} <= kinds
    for checkpoint in checkpoints:
        path = checkpoint["tinker_path"]
        if checkpoint["checkpoint_type"] == "training":
            assert train(service.create_training_client_from_state_with_optimizer(path).result(), 1)
        elif checkpoint["checkpoint_type"] == "sampler":
            prompt = tinker.ModelInput.from_ints([5, 6, 7])
            assert service.create_sampling_client(path).result().compute_logprobs(prompt).result()[1] is not None


def test_a_key_that_an_admin_made_still_works(upgraded: Upgraded):
    assert get(upgraded, "/api/v1/training_runs", upgraded.asked.key)["training_runs"] == []
    with tinker.ServiceClient(base_url=upgraded.url, api_key=upgraded.asked.key) as service:
        client = service.create_lora_training_client(base_model=BASE, rank=4).result()
        assert train(client, 1, supervised())
