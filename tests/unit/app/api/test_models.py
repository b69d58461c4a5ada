from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tinker
from marshmallow import Schema, ValidationError
from tinker.types.get_info_response import GetInfoResponse

from app import create_app, ids
from app.api.base import EXTENSION
from app.api.models import LoraConfig
from app.api.training import Adam
from app.domain import ops
from app.domain.records import BaseModelInfo, Checkpoint, Worker
from app.domain.results import Result
from app.errors import BadRequest
from app.services.base_models import BaseModels
from app.services.validation import check_lora, check_sampled
from app.settings import ApiSettings, Settings
from app.stores.redis.client import connect
from app.stores.redis.lifecycle import RedisLifecycle
from app.stores.redis.records import dump
from app.stores.redis.types import Lease
from tests.unit.app.conftest import BASE, Api, add_worker

LORA = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}


def op_of(api: Api, model: str, seq: int = 0) -> ops.Op:
    entry = api.services.oplog.entry(model, seq)
    assert entry is not None
    return ops.decode(entry.payload)


def test_create_model_journals_seq_0_under_the_id_the_sdk_computes(api: Api) -> None:
    session = api.session()
    body = {"session_id": session, "model_seq_id": 3, "base_model": BASE, "lora_config": LORA}
    answer = api.post("create_model", body)
    model = f"{session}:train:3"
    assert answer.json == {"request_id": f"{model}:0", "model_id": model}
    seed = ids.stable_seed(model)
    assert op_of(api, model) == ops.CreateModel(ops.ModelSpec(BASE, ops.LoraSpec(rank=8, seed=seed)))


def test_null_where_an_older_sdk_has_nothing_to_say_is_as_good_as_nothing(api: Api) -> None:
    session, lora = api.session(), {**LORA, "seed": None}
    asked = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": lora, "user_metadata": None}
    model = api.post("create_model", asked).json["model_id"]
    assert op_of(api, model).spec.lora == ops.LoraSpec(rank=8, seed=ids.stable_seed(model))
    save = api.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a", "ttl_seconds": None})
    assert save.status_code == 200
    missing = api.post("create_model", {**asked, "base_model": None})
    assert (missing.status_code, "base_model" in missing.json["detail"]) == (422, True)


def test_a_seed_of_the_client_is_kept(api: Api) -> None:
    model = api.model(lora_config={**LORA, "seed": 11})
    assert op_of(api, model).spec.lora.seed == 11


def test_every_hyperparameter_of_the_sdk_is_known() -> None:
    assert LoraConfig().fields.keys() == tinker.types.LoraConfig.model_fields.keys()
    assert Adam().fields.keys() == tinker.types.AdamParams.model_fields.keys()


@pytest.mark.parametrize("schema", [LoraConfig, Adam])
def test_a_hyperparameter_of_a_later_sdk_is_refused_only_where_it_is_used(schema: type[Schema]) -> None:
    for unused in (None, False, 0, 0.0, "", [], {}):
        assert schema().load({"of_a_later_sdk": unused}) == schema().load({})
    with pytest.raises(ValidationError, match="does not know this field"):
        schema().load({"of_a_later_sdk": 1e-3})


def test_a_retried_create_returns_the_original_future(api: Api) -> None:
    body = {"session_id": api.session(), "model_seq_id": 0, "base_model": BASE}
    first, again = api.post("create_model", body), api.post("create_model", body)
    assert (first.status_code, first.json) == (again.status_code, again.json)
    other = api.post("create_model", {**body, "lora_config": LORA})
    assert other.status_code == 400
    assert "used before with other content" in other.json["detail"]


def test_an_adapter_the_sampler_could_not_apply_is_refused_before_it_is_trained() -> None:
    trainer = BaseModelInfo(BASE, "GemmaForCausalLM", 300, 64, "float32", ("attn", "mlp", "unembed"))
    sampler = dataclasses.replace(trainer, trainable_groups=("attn", "mlp"))
    with pytest.raises(BadRequest, match="set train_unembed to false"):
        check_sampled(ops.LoraSpec(8), trainer, sampler)
    check_sampled(ops.LoraSpec(8, train_unembed=False), trainer, sampler)
    check_sampled(ops.LoraSpec(8), trainer, None)


def test_an_adapter_that_would_leave_the_experts_out_is_refused() -> None:
    info = BaseModelInfo("org/moe", "Qwen3MoeForCausalLM", 300, 64, "float32", ("attn", "unembed"))
    with pytest.raises(BadRequest) as caught:
        check_lora(ops.LoraSpec(8), 64, info)
    assert str(caught.value) == "LoRA does not cover the MLP layers or experts of org/moe yet: set train_mlp to false"
    check_lora(ops.LoraSpec(8, train_mlp=False), 64, info)
    check_lora(ops.LoraSpec(8), 64, dataclasses.replace(info, trainable_groups=("attn", "mlp")))


BAD_CREATES = {
    "unknown base": ({"base_model": "org/else"}, 400, ["org/else", BASE]),
    "rank below 0": ({"lora_config": {"rank": -1}}, 400, ["rank -1", "128"]),
    "full, which is not offered": ({"lora_config": None}, 400, ["full fine-tuning", BASE, "base_models.full"]),
    "rank 0, which is full": ({"lora_config": {"rank": 0}}, 400, ["full fine-tuning", BASE, "base_models.full"]),
    "rank too large": ({"lora_config": {"rank": 129}}, 400, ["rank 129", "maximum LoRA rank is 128"]),
    "rank no number": ({"lora_config": {"rank": "x"}}, 422, ["lora_config.rank", "'x'"]),
    "rank a fraction": ({"lora_config": {"rank": 1.5}}, 422, ["lora_config.rank", "1.5"]),
    "unknown LoRA field": ({"lora_config": {"alpha": 8}}, 422, ["lora_config.alpha", "correct its name, or leave it"]),
    "nothing to train": ({"lora_config": {"train_mlp": False, "train_attn": False}}, 400, ["train_attn, train_mlp"]),
    "dimuon": ({"optimizer_config": {"type": "dimuon", "version": 1}}, 400, ["dimuon", "adamw"]),
    "negative seq": ({"model_seq_id": -1}, 422, ["model_seq_id", "-1"]),
    "no base": ({"base_model": None}, 422, ["base_model"]),
}


@pytest.mark.parametrize("case", BAD_CREATES)
def test_a_model_that_could_not_train_is_refused(api: Api, case: str) -> None:
    change, status, words = BAD_CREATES[case]
    session = api.session()
    answer = api.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": BASE, **change})
    assert answer.status_code == status
    assert all(word in answer.json["detail"] for word in words), answer.json
    assert api.services.oplog.pending() == []
    assert api.post("get_info", {"model_id": f"{session}:train:0"}).status_code == 404


def test_a_base_without_its_first_worker_is_unavailable_not_wrong(api: Api, settings: Settings) -> None:
    for role in ("trainer", "sampler"):
        api.services.records.delete(Worker.namespace, f"{role}-0")
    fresh = create_app(settings)
    api = Api(fresh.test_client(), fresh.extensions[EXTENSION])
    body = {"session_id": api.session(), "model_seq_id": 0, "base_model": BASE}
    answer = api.post("create_model", body)
    assert answer.status_code == 503
    assert float(answer.headers["Retry-After"]) > 0
    add_worker(api.services, "trainer")
    assert api.post("create_model", body).status_code == 200
    api.services.records.delete(Worker.namespace, "trainer-0")
    again = api.post("create_model", {**body, "model_seq_id": 1})
    assert again.status_code == 200, "a restarting worker's Ops wait in the journal"


def test_get_info_names_the_tokenizer(api: Api) -> None:
    info = GetInfoResponse(**api.post("get_info", {"model_id": api.model()}).json)
    assert info.model_data.model_name == BASE
    assert info.model_data.tokenizer_id == "org/tiny-weights"


def test_a_local_tokenizer_is_named_by_its_absolute_folder(
    api: Api, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    base = settings.base_models[0].model_copy(update={"path": "weights"})
    bases = BaseModels(settings.model_copy(update={"base_models": (base,)}), api.services.records)
    assert bases.client_tokenizer(BASE) == str(tmp_path / "weights")


@pytest.mark.parametrize(
    ("reached", "named"),
    [
        ({}, False),
        ({"public_url": "http://localhost:80"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"public_url": "https://tinsmith.example.org"}, True),
        ({"host": "0.0.0.0", "tokenizers": "local"}, False),
        ({"tokenizers": "served"}, True),
    ],
)
def test_clients_elsewhere_get_the_name_of_a_local_tokenizer(
    api: Api, settings: Settings, tmp_path: Path, reached: dict[str, str], named: bool
) -> None:
    base = settings.base_models[0].model_copy(update={"path": str(tmp_path), "name": "org/tiny:variant"})
    mine = settings.model_copy(update={"base_models": (base,), "api": ApiSettings(**reached)})
    answered = BaseModels(mine, api.services.records).client_tokenizer("org/tiny:variant")
    assert answered == ("org/tiny" if named else str(tmp_path))


def test_another_ones_model_looks_missing(api: Api, stranger: Api) -> None:
    model = api.model()
    foreign = stranger.post("get_info", {"model_id": model})
    api.services.records.delete("models", model)
    missing = api.post("get_info", {"model_id": model})
    assert foreign.status_code == 404
    assert (foreign.status_code, foreign.data) == (missing.status_code, missing.data)


def save_checkpoint(api: Api, model: str, kind: str = "weights", **changes: object) -> str:
    """Writes the records that a worker writes when it commits a save."""
    owner = api.services.records.get("models", model)["owner"].strip('"')
    lora = dataclasses.asdict(ops.LoraSpec(rank=4, seed=5))
    path = f"tinker://{model}/{kind}/a"
    record = Checkpoint(owner, model, kind, BASE, "checkpoints/x", 1.0, 10, lora, ["adapter_config.json"])
    api.services.records.put("checkpoints", path, dump(dataclasses.replace(record, **changes)))
    return path


def test_a_model_from_a_checkpoint_takes_its_spec(api: Api) -> None:
    path = save_checkpoint(api, api.model())
    session = api.session()
    answer = api.post("load_weights", {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True})
    assert answer.json["request_id"] == f"{session}:train:1:0"
    spec = ops.ModelSpec(BASE, ops.LoraSpec(rank=4, seed=5))
    assert op_of(api, f"{session}:train:1") == ops.CreateModel(spec, path, True, "checkpoints/x")


BAD_LOADS = {
    "foreign": ({"owner": "somebody"}, {}, 404, "does not exist"),
    "expired": ({"expires_at": 1.0}, {}, 404, "does not exist"),
    "other base": ({}, {"base_model": "org/else"}, 400, BASE),
    "too large a rank": ({"lora": {"rank": 129}}, {}, 400, "rank 129"),
    "no path": ({}, {"path": "somewhere"}, 400, "'somewhere'"),
    "both addressings": ({}, {"model_id": "m", "seq_id": 1}, 422, "session_id and model_seq_id"),
    "no addressing": ({}, {"session_id": None}, 422, "session_id"),
}


@pytest.mark.parametrize("case", BAD_LOADS)
def test_a_checkpoint_that_cannot_be_loaded_is_refused(api: Api, case: str) -> None:
    record, body, status, word = BAD_LOADS[case]
    path = save_checkpoint(api, api.model(), **record)
    answer = api.post("load_weights", {"session_id": api.session(), "model_seq_id": 0, "path": path, **body})
    assert (answer.status_code, word in answer.json["detail"]) == (status, True), answer.json
    assert api.services.oplog.pending() == []


def test_a_repeated_create_from_a_checkpoint_is_the_same_call_though_that_was_deleted_since(
    api: Api, stranger: Api
) -> None:
    path = save_checkpoint(api, api.model())
    body = {"session_id": api.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    first = api.post("load_weights", body)
    api.services.records.delete(Checkpoint.namespace, path)
    again = api.post("load_weights", body)
    assert (first.status_code, again.status_code, again.json) == (200, 200, first.json), again.json
    others = ({"model_seq_id": 1}, {"path": path + "b"}, {"optimizer": False})
    assert [api.post("load_weights", {**body, **other}).status_code for other in others] == [404] * 3
    assert stranger.post("load_weights", body).status_code == 404


@pytest.mark.parametrize("result", [Result(b"{}"), Result.failure("its files are damaged")], ids=["done", "failed"])
def test_a_repeated_create_is_the_same_call_when_its_op_and_its_checkpoint_are_gone(api: Api, result: Result) -> None:
    path = save_checkpoint(api, api.model())
    body = {"session_id": api.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    first = api.post("load_weights", body)
    model = first.json["model_id"]
    api.commit(model, 0, result)
    lease = api.services.oplog.acquire(model, "node/test")
    assert isinstance(lease, Lease)
    api.services.records.delete(Checkpoint.namespace, path)
    answers = [api.post("load_weights", body)]
    api.services.oplog.set_snapshot(lease, 0, "models/snapshot")
    assert api.ops(model) == []
    answers.append(api.post("load_weights", body))
    assert [(answer.status_code, answer.json) for answer in answers] == [(200, first.json)] * 2


def test_optimizer_state_is_only_in_training_checkpoints(api: Api) -> None:
    path = save_checkpoint(api, api.model(), "sampler_weights")
    body = {"session_id": api.session(), "model_seq_id": 0, "path": path}
    assert "optimizer state" in api.post("load_weights", {**body, "optimizer": True}).json["detail"]
    assert api.post("load_weights", {**body, "optimizer": False}).status_code == 200


def test_an_unloaded_model_leaves_its_trainers_memory_once_nothing_waits_until_the_next_call(api: Api) -> None:
    model = api.model()
    unwanted = RedisLifecycle(connect(api.services.settings.redis.url), api.services.settings.engine).unwanted
    api.post("optim_step", {"model_id": model, "seq_id": 1})
    answer = api.post("unload_model", {"model_id": model, "type": "unload_model"})
    poll = api.post("retrieve_future", {"request_id": answer.json["request_id"]})
    assert (poll.status_code, poll.json) == (200, {"type": "unload_model", "model_id": model})
    assert unwanted([model]) == set(), "what was acknowledged runs first"
    api.commit(model, 1)
    assert unwanted([model]) == {model}
    assert api.post("optim_step", {"model_id": model, "seq_id": 2}).status_code == 200
    api.commit(model, 2)
    assert unwanted([model]) == set()


def test_another_ones_model_can_not_be_unloaded_and_looks_missing(api: Api, stranger: Api) -> None:
    def ask(who: Api) -> list[tuple[int, bytes]]:
        asked = {"unload_model": {"model_id": model}, "retrieve_future": {"request_id": f"{model}:unload:0"}}
        answers = [who.post(path, body) for path, body in asked.items()]
        return [(answer.status_code, answer.data) for answer in answers]

    model = api.model()
    foreign = ask(stranger)
    api.services.records.delete("models", model)
    assert foreign == ask(api)
    assert [status for status, _ in foreign] == [404, 404]
