"""Reads and changes of the SDK's RestClient, in both of its forms: a future, and its older twin `..._async`."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pyrage
import pytest
import requests
import tinker
from safetensors.numpy import load_file
from tinker import types
from tinker.types import SessionSearchRequest
from tinker.types.search_owner import AccessibleSearchOwner

from tests.contract.data import project_of, sentences, supervised, train
from tests.contract.stack import API_KEY, BASE, Stack, download_model

pytestmark = [
    pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def rest(stack: Stack) -> tinker.RestClient:
    return tinker.RestClient(base_url=stack.url, api_key=API_KEY)


def awaited(of: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(of)


def run_of(path: str) -> str:
    return path.removeprefix("tinker://").partition("/")[0]


def test_runs_are_paged_and_each_is_what_its_checkpoints_path_leads_to(
    rest: tinker.RestClient, service: tinker.ServiceClient, training: tinker.TrainingClient
):
    newest = service.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
    path = newest.save_state("kept").result().path
    first, second = (rest.list_training_runs(limit=1, offset=offset).result() for offset in (0, 1))
    assert first.training_runs[0].training_run_id == run_of(path), "the newest"
    assert first.cursor.total_count == second.cursor.total_count > 1
    assert awaited(rest.list_training_runs_async(limit=1)) == first
    run = rest.get_training_run(run_of(path)).result()
    assert run == rest.get_training_run_by_tinker_path(path).result() == first.training_runs[0]
    assert awaited(rest.get_training_run_async(run_of(path))) == run
    assert awaited(rest.get_training_run_by_tinker_path_async(path)) == run


def test_checkpoints_are_listed_of_a_run_and_of_all(rest: tinker.RestClient, training: tinker.TrainingClient):
    paths = [training.save_state(name).result().path for name in ("a", "b")][::-1]
    of_run = rest.list_checkpoints(run_of(paths[0])).result()
    assert [found.tinker_path for found in of_run.checkpoints] == paths
    assert awaited(rest.list_checkpoints_async(run_of(paths[0]))) == of_run
    page = rest.list_user_checkpoints(limit=2).result()
    assert [found.tinker_path for found in page.checkpoints] == paths
    assert page.cursor is not None
    assert page.cursor.total_count >= 2
    assert awaited(rest.list_user_checkpoints_async(limit=2)) == page


def test_weights_info_is_what_the_model_was_made_with(rest: tinker.RestClient, training: tinker.TrainingClient):
    info = rest.get_weights_info_by_tinker_path(training.save_state("kept").result().path).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (BASE, True, 8)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, True, True)


Change = Callable[[tinker.RestClient, str], Awaitable[None]]
FUTURES: dict[str, Change] = {
    "publish": lambda rest, path: rest.publish_checkpoint_from_tinker_path(path),
    "unpublish": lambda rest, path: rest.unpublish_checkpoint_from_tinker_path(path),
    "keep for two hours": lambda rest, path: rest.set_checkpoint_ttl_from_tinker_path(path, 7200),
    "keep": lambda rest, path: rest.set_checkpoint_ttl_from_tinker_path(path, None),
    "delete": lambda rest, path: rest.delete_checkpoint_from_tinker_path(path),
    "delete by its id": lambda rest, path: rest.delete_checkpoint(run_of(path), "weights/kept"),
}
TWINS: dict[str, Change] = {
    "publish": lambda rest, path: rest.publish_checkpoint_from_tinker_path_async(path),
    "unpublish": lambda rest, path: rest.unpublish_checkpoint_from_tinker_path_async(path),
    "keep for two hours": lambda rest, path: rest.set_checkpoint_ttl_from_tinker_path_async(path, 7200),
    "keep": lambda rest, path: rest.set_checkpoint_ttl_from_tinker_path_async(path, None),
    "delete": lambda rest, path: rest.delete_checkpoint_from_tinker_path_async(path),
    "delete by its id": lambda rest, path: rest.delete_checkpoint_async(run_of(path), "weights/kept"),
}


@pytest.mark.parametrize("changes", [FUTURES, TWINS], ids=["futures", "twins"])
def test_a_checkpoint_is_published_kept_for_a_while_and_deleted(
    rest: tinker.RestClient, training: tinker.TrainingClient, changes: dict[str, Change]
):
    path = training.save_state("kept").result().path

    def after(change: str) -> types.Checkpoint | None:
        async def make() -> None:
            await changes[change](rest, path)

        awaited(make())
        return next(iter(rest.list_checkpoints(run_of(path)).result().checkpoints), None)

    assert after("publish").public
    assert not after("unpublish").public
    assert after("keep for two hours").expires_at is not None
    assert after("keep").expires_at is None
    assert after("delete") is None
    assert training.save_state("kept").result().path == path
    assert after("delete by its id") is None


def test_a_copy_holds_the_same_weights_and_cannot_be_trained(
    rest: tinker.RestClient, service: tinker.ServiceClient, training: tinker.TrainingClient, stack: Stack
):
    train(training, 2)
    source = training.save_state("kept").result().path
    expected = training.forward(supervised(), "cross_entropy").result().metrics["loss:sum"]
    project = project_of(rest, run_of(source).partition(":train:")[0])
    copies = [
        rest.copy_weights(source, project).result(),
        awaited(rest.copy_weights_async(source, project)),
        tinker.ServiceClient(base_url=stack.url, api_key=API_KEY, project_id=project).copy_weights(source).result(),
    ]
    assert len({run_of(path) for path in (source, *copies)}) == 4
    rest.delete_checkpoint_from_tinker_path(source).result()
    for path in copies:
        loaded = service.create_training_client_from_state_with_optimizer(path).result()
        assert loaded.forward(supervised(), "cross_entropy").result().metrics["loss:sum"] == expected
        body = {"model_id": run_of(path), "seq_id": 2, "adam_params": {}}
        step = requests.post(f"{stack.url}/api/v1/optim_step", json=body, headers={"X-API-Key": API_KEY}, timeout=60)
        assert (step.status_code, "create a new model" in step.text) == (410, True), step.text


def test_sessions_are_listed_found_and_opened(rest: tinker.RestClient, stack: Stack):
    metadata = {"purpose": "search"}
    with tinker.ServiceClient(
        base_url=stack.url, api_key=API_KEY, user_metadata=metadata, display_name="Needle"
    ) as client:
        training = client.create_lora_training_client(base_model=BASE, rank=8).result()
        sampling = client.create_sampling_client(base_model=BASE).result()
        sampling.sample(types.ModelInput.from_ints(sentences(1)[0]), 1, types.SamplingParams(max_tokens=2)).result()
        run = training.get_info().model_id
        session = run.partition(":train:")[0]
        assert session in rest.list_sessions(limit=1).result().sessions
        assert awaited(rest.list_sessions_async(limit=1)).sessions == [session]
        opened = rest.get_session(session).result()
        assert (opened.training_run_ids, len(opened.sampler_ids)) == ([run], 1)
        assert (opened.user_metadata, opened.display_name) == (metadata, "Needle")
        assert awaited(rest.get_session_async(session)) == opened
        sampler = rest.get_sampler(opened.sampler_ids[0]).result()
        assert sampler.base_model == BASE
        assert awaited(rest.get_sampler_async(opened.sampler_ids[0])) == sampler
        training.save_state("kept").result()
    asked = SessionSearchRequest(display_name="needle", user_metadata=metadata, owner=AccessibleSearchOwner())
    [found] = rest.search_sessions(asked).result().sessions
    assert (found.session_id, found.checkpoints_count) == (session, 1)
    assert found.status is not None
    assert found.status.type == "client_finished"


def test_a_session_stays_where_it_is_when_it_is_given_to_its_own_project_and_goes_to_no_unknown_one(
    rest: tinker.RestClient, training: tinker.TrainingClient
):
    run = training.get_info().model_id
    session = run.partition(":train:")[0]
    project = project_of(rest, session)
    rest.assign_session_project(session, project).result()
    awaited(rest.assign_session_project_async(session, project))
    assert project_of(rest, session) == project
    with pytest.raises(tinker.NotFoundError, match="no-such-project"):
        rest.assign_session_project(session, "no-such-project").result()


def test_a_trace_holds_the_calls_of_its_session(rest: tinker.RestClient, training: tinker.TrainingClient):
    train(training, 2)
    session = training.get_info().model_id.partition(":train:")[0]
    for url in (rest.export_session_trace(session).result(), awaited(rest.export_session_trace_async(session))):
        with urllib.request.urlopen(url) as answer:
            events = json.load(answer)["traceEvents"]
        begun = [event["name"] for event in events if event["ph"] == "b"]
        assert begun == ["create_model", *["forward_backward", "optim_step"] * 2]
        assert sum(event["ph"] == "e" for event in events) == len(begun)


def test_an_encrypted_export_is_the_plain_one_to_whoever_has_the_key(
    rest: tinker.RestClient, training: tinker.TrainingClient, stack: Stack, tmp_path: Path
):
    train(training, 1)
    plain = download_model(training, stack, _folder(tmp_path, "plain"))
    key = pyrage.x25519.Identity.generate()
    path = training.save_weights_external("secret", age_encryption_recipients=[str(key.to_public())]).result().path
    found = awaited(rest.get_external_weights_urls_async(path))
    assert {name.removesuffix(".age") for name in found.urls} == {file.name for file in plain.iterdir()}
    assert all(name.endswith(".age") for name in found.urls)
    secret = _folder(tmp_path, "secret")
    for name, url in found.urls.items():
        with urllib.request.urlopen(url) as answer:
            (secret / name.removesuffix(".age")).write_bytes(pyrage.decrypt(answer.read(), [key]))
    tensors = [load_file(folder / "adapter_model.safetensors") for folder in (plain, secret)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all((tensors[0][name] == tensors[1][name]).all() for name in tensors[0])


def test_what_the_server_can_do_is_the_same_to_every_client(rest: tinker.RestClient, service: tinker.ServiceClient):
    [model] = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.trainable, model.sampleable) == (BASE, True, True)
    assert service.create_rest_client().get_server_capabilities().result().supported_models == [model]
    assert service.get_server_capabilities().supported_models == [model]
    assert awaited(service.get_server_capabilities_async()).supported_models == [model]


def _folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name
