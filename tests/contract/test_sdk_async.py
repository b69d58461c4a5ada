"""A complete run through the SDK's `..._async` methods, which older programs use."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.lib.api_future_impl import QueueState
from tinker.types import SessionSearchRequest

from app.domain.progress import Recorded
from app.stores.redis.client import connect
from app.stores.redis.records import RedisRecords
from tests.contract.data import ADAM, logprobs, sentences, supervised
from tests.contract.stack import API_KEY, BASE, Stack

pytestmark = [
    pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
TOKENS = sentences(1)[0]
PROMPT = types.ModelInput.from_ints(TOKENS)


def run(of: Coroutine[Any, Any, None]) -> None:
    asyncio.run(of)


async def loss_of(training: tinker.TrainingClient) -> float:
    output = await (await training.forward_async(supervised(), "cross_entropy")).result_async()
    return output.metrics["loss:sum"]


def negative(data: list[types.Datum], given: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = -sum(row.sum() for row in given)
    return loss, {"custom/nll:sum": float(loss)}


def test_it_trains_saves_loads_and_samples(service: tinker.ServiceClient):
    async def program() -> None:
        training = await service.create_lora_training_client_async(base_model=BASE, rank=8, seed=3)
        before = await loss_of(training)
        for _ in range(2):
            batch = await training.forward_backward_async(supervised(), "cross_entropy")
            step = await training.optim_step_async(ADAM)
            await asyncio.gather(batch.result_async(), step.result_async())
        custom = await training.forward_backward_custom_async(supervised(), negative)
        await custom.result_async()
        await (await training.optim_step_async(ADAM)).result_async()
        after = await loss_of(training)
        assert after < before

        info = await training.get_info_async()
        assert info.lora_rank == 8
        saved = (await (await training.save_state_async("kept")).result_async()).path
        for load in (training.load_state_async, training.load_state_with_optimizer_async):
            await (await load(saved)).result_async()
            assert await loss_of(training) == after
        for create in (
            service.create_training_client_from_state_async,
            service.create_training_client_from_state_with_optimizer_async,
        ):
            assert await loss_of(await create(saved)) == after

        exported = await (await training.save_weights_external_async("out")).result_async()
        assert exported.path.endswith("/external_weights/out")
        path = (await (await training.save_weights_for_sampler_async("policy")).result_async()).path
        samplers = [
            await training.save_weights_and_get_sampling_client_async(),
            await training.create_sampling_client_async(path),
            await service.create_sampling_client_async(model_path=path),
        ]
        expected = await (await training.forward_async([supervised()[0]], "cross_entropy")).result_async()
        for sampler in samplers:
            assert await sampler.get_base_model_async() == BASE
            scores = await sampler.compute_logprobs_async(PROMPT)
            np.testing.assert_allclose(scores[1:], logprobs(expected)[: len(TOKENS) - 1], atol=1e-3)
            result = await sampler.sample_async(PROMPT, 2, types.SamplingParams(max_tokens=3, seed=1))
            assert len(result.sequences) == 2

    run(program())


def test_a_future_is_awaited_in_every_form(training: tinker.TrainingClient):
    async def program() -> None:
        futures = [training.forward(supervised(), "cross_entropy") for _ in range(4)]
        found = [
            await futures[0],
            await futures[1].result_async(),
            await futures[2].coroutine(),
            await asyncio.wrap_future(futures[3].future()),
        ]
        assert len({output.metrics["loss:sum"] for output in found}) == 1

    run(program())
    assert training.forward(supervised(), "cross_entropy").result(timeout=240).metrics["loss:sum"] > 0


def test_the_loads_that_keep_a_model_give_back_what_was_saved(training: tinker.TrainingClient):
    before = training.forward(supervised(), "cross_entropy").result().metrics["loss:sum"]
    path = training.save_state("kept").result().path
    training.forward_backward(supervised(), "cross_entropy").result()
    training.optim_step(ADAM).result()
    assert training.forward(supervised(), "cross_entropy").result().metrics["loss:sum"] != before
    training.load_state_with_optimizer(path).result()
    assert training.forward(supervised(), "cross_entropy").result().metrics["loss:sum"] == before


def test_what_clients_say_of_themselves_names_their_session_and_run(
    service: tinker.ServiceClient, training: tinker.TrainingClient
):
    run_id = training.get_info().model_id
    assert service.get_console_url().endswith(run_id.partition(":train:")[0])
    assert training.get_console_url().endswith(run_id)
    rest = service.create_rest_client()
    assert all(client.get_telemetry() is not None for client in (service, training, rest))


def test_metrics_that_a_client_reports_with_the_sdk_are_kept_for_its_run(stack: Stack):
    with stack.client() as client:
        training = client.create_lora_training_client(base_model=BASE, rank=8).result()
        run_id = training.get_info().model_id
        training.get_telemetry().log("metrics", {"model_id": run_id, "step": 1, "metrics": {"reward": 0.75}})
    with connect(stack.settings().redis.url) as state:
        assert RedisRecords(state).recorded([run_id]) == [[Recorded(1, {"reward": 0.75})]]


def test_a_sampler_made_from_what_a_client_holds_samples_and_says_why_it_waits(
    service: tinker.ServiceClient, caplog: pytest.LogCaptureFixture
):
    sampling = tinker.SamplingClient.create(service.holder, base_model=BASE).result()
    assert sampling.get_telemetry() is service.get_telemetry()
    assert sampling.get_base_model() == BASE
    with caplog.at_level("WARNING"):
        sampling.on_queue_state_change(QueueState.PAUSED_CAPACITY, "no sampler is there")
    assert "no sampler is there" in caplog.text


def test_a_client_that_is_closed_has_finished_its_session(stack: Stack):
    client = stack.client()
    run_id = client.create_lora_training_client(base_model=BASE, rank=8).result().get_info().model_id
    client.close("interrupted").result()
    session_id = run_id.partition(":train:")[0]
    rest = tinker.RestClient(base_url=stack.url, api_key=API_KEY)
    [found] = rest.search_sessions(SessionSearchRequest(session_id=session_id)).result().sessions
    assert found.status is not None
    assert found.status.model_dump()["reason"] == {"type": "interrupted"}


def test_a_client_for_administrators_connects(stack: Stack):
    tinker.AdminClient(base_url=stack.url, api_key=API_KEY).get_telemetry()
