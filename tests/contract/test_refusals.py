"""Bad input gets a clear 4xx, enqueues nothing, and leaves the model usable."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
from tinker import types

from tests.contract.data import ADAM, datum, policy, sentences, supervised, train
from tests.contract.stack import BASE, Stack

TOKENS = sentences(1)[0]
BAD_BATCHES = {
    "a token beyond the vocabulary": ([datum([5, 6, 4000])], "cross_entropy", "4000"),
    "a negative token": ([datum([5, -1, 7])], "cross_entropy", "-1"),
    "weights of another length": ([datum(TOKENS, weights=[1.0])], "cross_entropy", "weights"),
    "a weight that is no number": ([datum(TOKENS, weights=[float("nan")] * len(TOKENS))], "cross_entropy", "weights"),
    "a loss nobody knows": (supervised(1), "cross_entropy_typo", "importance_sampling"),
    "a loss without its inputs": (supervised(1), "ppo", "logprobs"),
    "a sequence beyond the context": ([datum([5] * 600)], "cross_entropy", "600"),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_bad_batch_is_refused_by_value_and_the_model_lives_on(training: tinker.TrainingClient, case):
    batch, loss, named = BAD_BATCHES[case]
    with pytest.raises(tinker.BadRequestError, match=named):
        training.forward_backward(batch, loss).result()
    assert train(training, 2)[0] > 0


CHUNK = [datum([5, 6])] * 1024
BAD = datum([5, 4000])


def test_a_batch_refused_in_its_second_chunk_leaves_the_client_usable(training: tinker.TrainingClient):
    with pytest.raises(tinker.BadRequestError, match="4000"):
        training.forward([*CHUNK, BAD], "cross_entropy").result()
    after = training.forward(supervised(), "cross_entropy").result(timeout=60)
    assert after.metrics["loss:sum"] > 0


@pytest.mark.parametrize("batch", [[BAD, *CHUNK], [*CHUNK, BAD]], ids=["its first chunk", "its second chunk"])
def test_no_step_is_taken_on_the_other_chunk_of_a_refused_batch(training: tinker.TrainingClient, batch):
    """The SDK sends the next chunk and the step before its caller can know of the refusal."""
    before = training.forward(supervised(), "cross_entropy").result()
    refused, step = training.forward_backward(batch, "cross_entropy"), training.optim_step(ADAM)
    with pytest.raises(tinker.BadRequestError, match="4000"):
        refused.result()
    with pytest.raises(tinker.RequestFailedError, match=r"no step was taken.*4000"):
        step.result(timeout=60)
    after = training.forward(supervised(), "cross_entropy").result()
    assert before.metrics["loss:sum"] == after.metrics["loss:sum"]
    assert train(training, 2)[1] < before.metrics["loss:sum"], "the run goes on"


def test_an_infinite_ratio_fails_the_future_by_datum_and_changes_nothing(training: tinker.TrainingClient):
    good = policy()
    bad = datum(TOKENS, logprobs=[-1e30] * len(TOKENS), advantages=[1.0] * len(TOKENS))
    with pytest.raises(tinker.RequestFailedError, match=r"datum 1"):
        training.forward_backward([good[0], bad], "importance_sampling").result()
    before = training.forward(supervised(), "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match=r"no step was taken.*datum 1"):
        training.optim_step(ADAM).result()
    after = training.forward(supervised(), "cross_entropy").result()
    assert before.metrics["loss:sum"] == after.metrics["loss:sum"]
    assert train(training, 2)[1] < before.metrics["loss:sum"], "the run goes on"


def test_a_step_whose_weights_overflow_fails_its_future_and_changes_nothing(training: tinker.TrainingClient):
    train(training, 1)
    before = training.forward(supervised(), "cross_entropy").result()
    training.forward_backward(supervised(), "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=r"learning_rate 1e\+20; no step was taken"):
        training.optim_step(types.AdamParams(learning_rate=1e20)).result()
    after = training.forward(supervised(), "cross_entropy").result()
    assert before.metrics["loss:sum"] == after.metrics["loss:sum"]
    assert train(training, 2)[1] < before.metrics["loss:sum"], "the run goes on"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"rank": -1}, "rank"), ({"rank": 4096}, "4096"), ({"rank": 8, "base_model": "no/such-model"}, BASE)],
)
def test_a_model_that_cannot_be_is_refused(service: tinker.ServiceClient, arguments, named):
    with pytest.raises(tinker.BadRequestError, match=named):
        service.create_lora_training_client(**{"base_model": BASE, **arguments}).result()


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_bad_step_is_refused(training: tinker.TrainingClient, rate: float):
    with pytest.raises((tinker.BadRequestError, tinker.UnprocessableEntityError), match="learning_rate"):
        training.optim_step(types.AdamParams(learning_rate=rate)).result()
    assert train(training, 1)


def test_a_name_that_is_taken_fails_the_save_unless_overwritten(training: tinker.TrainingClient):
    training.save_state("once").result()
    with pytest.raises(tinker.RequestFailedError, match="once"):
        training.save_state("once").result()
    assert training.save_state("once", overwrite=True).result().path.endswith("/once")


def test_sampling_limits_are_named(service: tinker.ServiceClient):
    client = service.create_sampling_client(base_model=BASE).result()
    prompt = types.ModelInput.from_ints(TOKENS)
    for params, named in (
        (types.SamplingParams(max_tokens=0), "max_tokens"),
        (types.SamplingParams(max_tokens=4, temperature=-1.0), "temperature"),
        (types.SamplingParams(max_tokens=4, top_p=2.0), "top_p"),
    ):
        with pytest.raises((tinker.BadRequestError, tinker.UnprocessableEntityError), match=named):
            client.sample(prompt, num_samples=1, sampling_params=params).result()
    with pytest.raises(tinker.BadRequestError, match="600"):
        client.sample(types.ModelInput.from_ints([5] * 600), 1, types.SamplingParams(max_tokens=4)).result()


def test_a_wrong_key_is_refused_before_anything_else(stack: Stack):
    with pytest.raises(tinker.AuthenticationError), tinker.ServiceClient(base_url=stack.url, api_key="tml-x") as client:
        client.create_lora_training_client(base_model=BASE).result()


def test_weights_can_be_any_real_number(training: tinker.TrainingClient):
    weights = np.linspace(-2, 2, len(TOKENS)).astype(np.float32)
    output = training.forward_backward([datum(TOKENS, weights=weights)], "cross_entropy").result()
    scores = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert output.metrics["loss:sum"] == pytest.approx(float(-(weights * scores).sum()), rel=1e-5)
