"""A base model that cannot be served ends its own workers, once. The others of the stack are served: one of them in 4
bits, one without a sampler, and one without a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from app.domain.records import Refusal
from app.stores.redis.records import RedisRecords, dump
from tests.contract.data import datum
from tests.contract.stack import BASE, Stack, running
from tests.contract.test_restart import await_true, children
from tests.contract.test_samplers import call
from tests.contract.test_setup_errors import up
from tests.models import tiny_opt
from tests.servers import free_port

ODD = "tests/tiny-opt"
IN_4_BITS = "tests/tiny-nf4"
TRAINED_ONLY, SAMPLED_ONLY = "tests/tiny-trained", "tests/tiny-sampled"
REASON = (
    f"base model {ODD!r} (OPTForCausalLM) cannot be trained with LoRA: it has modules that Tinsmith does not know: "
    "model.decoder.layers.*.fc1, model.decoder.layers.*.fc2, model.decoder.layers.*.self_attn.out_proj"
)


@pytest.fixture(scope="module")
def odd_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_opt(tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, base_path: Path, odd_path: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("mixed") / "data"
    odd = f'[[base_models]]\nname = "{ODD}"\npath = "{odd_path}"\nsampler.backend = "transformers"\n'
    odd += f'[[base_models]]\nname = "{IN_4_BITS}"\npath = "{base_path}"\ndtype = "nf4"\n'
    odd += 'trainer.backend = "torch"\nsampler.backend = "transformers"\n'
    odd += f'[[base_models]]\nname = "{TRAINED_ONLY}"\npath = "{base_path}"\ndtype = "float32"\n'
    odd += 'trainer.backend = "torch"\nsampler.count = 0\n'
    odd += f'[[base_models]]\nname = "{SAMPLED_ONLY}"\npath = "{base_path}"\ndtype = "float32"\n'
    odd += 'trainer.count = 0\nsampler.backend = "transformers"'
    trainer, sampler, program = 'backend = "torch"', 'backend = "transformers"', "tests.warm_workers"
    with running(Stack(folder, base_path, free_port(), trainer, sampler, odd, program)) as stack:
        yield stack


def test_each_worker_of_it_ends_once_with_the_line(mixed: Stack):
    refusals = [line for line in mixed.output if REASON in line]
    assert sorted(line.partition(":")[0] for line in refusals) == ["sampler-0", "trainer-0"]
    for name in ("sampler-0", "trainer-0"):
        log = (mixed.data_dir / "logs" / f"{name}.log").read_text()
        assert log.count(REASON) == 1


@pytest.mark.parametrize("name", [BASE, IN_4_BITS])
def test_the_other_base_models_train_and_sample(name: str, mixed: Stack):
    with mixed.client() as service:
        client = service.create_lora_training_client(base_model=name, rank=4).result()
        assert client.forward_backward([datum([5, 6, 7])], "cross_entropy").result().loss_fn_outputs
        sampler = service.create_sampling_client(base_model=name).result()
        params = tinker.SamplingParams(max_tokens=2)
        assert sampler.sample(tinker.ModelInput.from_ints([5, 6]), 1, params).result().sequences


def test_a_base_model_without_a_sampler_is_trained_and_saved_and_its_samples_are_refused(mixed: Stack):
    with mixed.client() as service:
        client = service.create_lora_training_client(base_model=TRAINED_ONLY, rank=4).result()
        assert client.forward_backward([datum([5, 6, 7])], "cross_entropy").result().loss_fn_outputs
        path = client.save_weights_for_sampler("one").result().path
        sampler = service.create_sampling_client(model_path=path).result()
        with pytest.raises(tinker.BadRequestError, match=r"has no sampler here: sampler\.count is 0"):
            sampler.sample(tinker.ModelInput.from_ints([5, 6]), 1, tinker.SamplingParams(max_tokens=2)).result()


def test_a_base_model_without_a_trainer_is_sampled_and_its_runs_are_refused(mixed: Stack):
    with mixed.client() as service:
        sampler = service.create_sampling_client(base_model=SAMPLED_ONLY).result()
        params = tinker.SamplingParams(max_tokens=2)
        assert sampler.sample(tinker.ModelInput.from_ints([5, 6]), 1, params).result().sequences
        with pytest.raises(tinker.BadRequestError, match=r"has no trainer here: trainer\.count is 0"):
            service.create_lora_training_client(base_model=SAMPLED_ONLY, rank=4).result()


def test_a_client_that_asks_for_it_is_told_the_reason_at_once(mixed: Stack):
    with mixed.client() as service:
        with pytest.raises(tinker.BadRequestError, match="fc1, model"):
            service.create_lora_training_client(base_model=ODD, rank=4).result()
        sampler = service.create_sampling_client(base_model=ODD).result()
        with pytest.raises(tinker.BadRequestError, match="fc1, model"):
            sampler.sample(tinker.ModelInput.from_ints([5, 6]), 1, tinker.SamplingParams(max_tokens=2)).result()


def test_the_capabilities_say_what_is_covered_and_what_is_refused(mixed: Stack):
    odd, in_4_bits, trained, sampled, base = call(mixed, "api/v1/get_server_capabilities").json()["supported_models"]
    assert (odd["model_name"], odd["trainable"], odd["sampleable"]) == (ODD, False, False)
    assert odd["refusals"] == {"trainer": REASON, "sampler": REASON}
    assert [model["dtype"] for model in (odd, in_4_bits, base)] == [None, "nf4", "float32"]
    assert [(one["trainable"], one["sampleable"]) for one in (trained, sampled)] == [(True, False), (False, True)]
    assert (base["trainable"], base["trainable_groups"]) == (True, ["attn", "mlp", "unembed"])
    assert (base["never_adapted"], base["refusals"]) == ({}, {})
    assert f"{BASE}: LoRA on attn, mlp, unembed\n" in mixed.output


def test_a_worker_that_starts_takes_the_refusal_of_its_role_back(mixed: Stack):
    with mixed.redis() as client:
        records, refused = RedisRecords(client), Refusal.id("trainer", BASE)
        records.put(Refusal.namespace, refused, dump(Refusal("trainer", BASE, "it was another model")))
        [trainer] = children(mixed, "--name trainer-3")
        trainer.kill()
        await_true(lambda: records.get(Refusal.namespace, refused) is None)
        assert records.get(Refusal.namespace, Refusal.id("trainer", ODD)) is not None


def test_a_stack_of_it_alone_ends_with_2(odd_path: Path, tmp_path: Path):
    code, lines = up(tmp_path, odd_path)
    assert lines[-1] == "tinsmith: none of the base models can be served; give another with --base-model NAME=PATH"
    assert [line.partition(":")[0] for line in sorted(lines[:-1])] == ["sampler-0", "trainer-0"]
    assert all("model.decoder.layers.*.fc1" in line for line in lines[:-1])
    assert code == 2
