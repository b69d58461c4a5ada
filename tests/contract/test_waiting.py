"""The SDK's waiting, cancellation and backoff for samples, against the real API. The tests stand in for the sampler."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types
from tinker.lib import internal_client_holder

from app.domain import ops
from app.domain.records import Worker
from app.domain.results import PROTOBUF, Result
from app.domain.sampling import SampledSequence, SampleOutput, SampleRequest
from app.stores.redis.types import Pending
from app.wire.results import encode_sample
from tests.api_server import BASE, KEY, ApiServer, start_api
from tests.contract.awaiting import await_true, awaited, held_polls

FORMS = {"one poll for all": "batch_polls = true", "a poll each": "batch_polls = false"}
PARAMS = types.SamplingParams(max_tokens=4, temperature=1.0, stop=[])


@pytest.fixture(scope="module", params=list(FORMS))
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    extra = f"{FORMS[request.param]}\npoll_hold_s = 2"
    with start_api(tmp_path_factory.mktemp("api"), extra, sampler="queue_requests = 8") as server:
        yield server


@pytest.fixture
def sampling(api: ApiServer) -> Iterator[tinker.SamplingClient]:
    with tinker.ServiceClient(base_url=api.url, api_key=KEY) as service:
        yield service.create_sampling_client(base_model=BASE).result()


def sample(client: tinker.SamplingClient, token: int) -> concurrent.futures.Future[types.SampleResponse]:
    return client.sample(types.ModelInput.from_ints([token]), num_samples=1, sampling_params=PARAMS).future()


def waiting(api: ApiServer) -> list[Pending]:
    return api.oplog.pending()


def answer(api: ApiServer, request_id: str) -> None:
    """Answers as a sampler does: the prompt is returned as the sample."""
    entry = api.oplog.claim_sample(request_id, "s/1")
    if entry is not None:
        request: SampleRequest = ops.decode(entry.payload)
        sequence = SampledSequence(request.prompt, np.full(len(request.prompt), -1.0, np.float32), False)
        api.oplog.finish_sample(request_id, Result(encode_sample(SampleOutput((sequence,))), PROTOBUF))


@contextmanager
def sampler(api: ApiServer) -> Iterator[None]:
    """Answers all waiting requests."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.02):
            for pending in waiting(api):
                answer(api, pending.id)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Hasty:
    """The asyncio module with pauses of at most 20 ms.

    The SDK's heartbeat and refresh of flags, otherwise every 10 s, are then under way at most closes.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def sleep(self, delay: float) -> Coroutine[Any, Any, None]:
        return asyncio.sleep(min(delay, 0.02))


def tokens(found: concurrent.futures.Future[types.SampleResponse]) -> list[int]:
    return list(found.result(240).sequences[0].tokens)


def test_samples_that_are_put_off_come_back_and_every_one_has_its_own_result(
    api: ApiServer, sampling: tinker.SamplingClient
):
    """20 samples at once, where 8 may wait: the SDK sends those that got a 429 again under the same seq."""
    asked = [sample(sampling, token) for token in range(20)]
    await_true(lambda: len(waiting(api)) == 8, "the queue never filled")
    with sampler(api):
        assert [tokens(found) for found in asked] == [[token] for token in range(20)]
    ids = {found.result().sequences[0].sequence_id.removesuffix("-0") for found in asked}
    assert {int(id_.rpartition(":")[2]) for id_ in ids} == set(range(20)), "none used a second seq"
    assert waiting(api) == []


def test_a_clients_samples_cost_one_held_poll_or_one_each(api: ApiServer, sampling: tinker.SamplingClient):
    asked = [sample(sampling, token) for token in range(6)]
    in_one = sampling.holder.get_client_config().sample_use_retrieve_futures
    await_true(lambda: awaited(api.url, sampling) == 6, "the SDK never waited for them")
    await_true(lambda: held_polls(api.url) == (1 if in_one else 6), "another number of polls is held")
    with sampler(api):
        assert [tokens(found) for found in asked] == [[token] for token in range(6)]


def test_results_that_came_before_the_wait_arrive(api: ApiServer, sampling: tinker.SamplingClient):
    with sampler(api):
        assert [tokens(sample(sampling, token)) for token in range(5)] == [[token] for token in range(5)]


def test_a_failed_sample_says_why(api: ApiServer, sampling: tinker.SamplingClient):
    asked = sample(sampling, 1)
    await_true(lambda: waiting(api), "it never came")
    api.oplog.finish_sample(waiting(api)[0].id, Result.failure("no such luck"))
    with pytest.raises(tinker.RequestFailedError, match="no such luck"):
        asked.result(240)


def test_a_sample_nobody_awaits_any_more_is_cancelled_and_the_others_go_on(
    api: ApiServer, sampling: tinker.SamplingClient
):
    asked = [sample(sampling, token) for token in range(4)]
    await_true(lambda: awaited(api.url, sampling) == 4, "the SDK never waited for them")
    for given_up in asked[::2]:
        assert given_up.cancel()
    await_true(lambda: len(waiting(api)) == 2, "they were not cancelled")
    with sampler(api):
        assert [tokens(found) for found in asked[1::2]] == [[1], [3]]


def test_clients_made_from_a_handle_have_seqs_of_their_own(
    api: ApiServer, sampling: tinker.SamplingClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    handle = sampling.get_sampler_handle()
    clients = [sampling, *(tinker.SamplingClient.from_sampler_handle(handle) for _ in range(2))]
    asked = [sample(client, token) for token, client in enumerate(clients)]
    await_true(lambda: len(waiting(api)) == 3, "they never came")
    seqs = sorted(int(pending.id.rpartition(":")[2]) // 10**9 for pending in waiting(api))
    assert seqs == [0, 1, 2]
    with sampler(api):
        assert [tokens(found) for found in asked] == [[0], [1], [2]]


def test_a_client_that_closes_cancels_what_it_left(api: ApiServer):
    with tinker.ServiceClient(base_url=api.url, api_key=KEY) as service:
        client = service.create_sampling_client(base_model=BASE).result()
        asked = sample(client, 1)
        await_true(lambda: waiting(api), "it never came")
    await_true(lambda: not waiting(api), "it is still there")
    del asked


def test_a_client_behind_others_learns_how_many_calls_run_first(
    api: ApiServer, sampling: tinker.SamplingClient, monkeypatch: pytest.MonkeyPatch
):
    """The SDK passes the number to its queue observer, if it polls for each sample."""
    reported: list[str] = []
    monkeypatch.setattr(
        type(sampling), "on_queue_state_change", lambda _, state, reason: reported.append(f"{state.name}: {reason}")
    )
    asked = [sample(sampling, token) for token in range(3)]
    if not sampling.holder.get_client_config().sample_use_retrieve_futures:
        await_true(lambda: "ACTIVE: about 2 calls run before it" in reported, "it was not reported")
    with sampler(api):
        assert [tokens(found) for found in asked] == [[0], [1], [2]]


def test_without_a_sampler_the_sdk_says_so_to_its_user(
    api: ApiServer, sampling: tinker.SamplingClient, caplog: pytest.LogCaptureFixture
):
    """This needs a poll for each sample: the answer to a batch poll has no field for it."""
    asked = sample(sampling, 1)
    await_true(lambda: waiting(api), "it never came")
    record = api.records.get(Worker.namespace, "sampler-0@test")
    assert record is not None
    api.records.delete(Worker.namespace, "sampler-0@test")
    try:
        with caplog.at_level(logging.WARNING):
            if not sampling.holder.get_client_config().sample_use_retrieve_futures:
                await_true(lambda: f"no sampler of {BASE} is running" in caplog.text, "it was not reported")
    finally:
        api.records.put(Worker.namespace, "sampler-0@test", record)
    with sampler(api):
        assert tokens(asked) == [1]


def test_clients_that_close_right_after_a_result_end_although_their_heartbeat_is_being_answered(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
):
    """The SDK's close cancels its heartbeat and waits for it: pyqwest loses that at one close in four (Python 3.11)."""
    monkeypatch.setattr(internal_client_holder, "asyncio", Hasty())
    for _ in range(8):
        services = [tinker.ServiceClient(base_url=api.url, api_key=KEY) for _ in range(4)]
        with sampler(api):
            asked = [sample(service.create_sampling_client(base_model=BASE).result(240), 1) for service in services]
            assert [tokens(found) for found in asked] == [[1]] * len(services)
        for closing in [service.close("success") for service in services]:
            closing.result(240)
