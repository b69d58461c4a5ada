"""Today's contracts are those of ecb7b39, plus the listed additions."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest

from app.domain import ops
from app.domain.checkpoints import Manifest
from app.stores.redis.records import load
from tests.golden import names, public, recording, scripts, values
from tests.golden.added import ADDED, CHANGED, REWORDED
from tests.servers import start_valkey

FROZEN = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "ecb7b39").glob("*.json")}
ENTRIES = ("workers.celery_app", "workers.trainer", "workers.sampler", "workers.node", "app.wsgi")


def as_json(found: Any) -> Any:
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module")
def found_in_public() -> dict[str, Any]:
    return dict(as_json(public.goldens()))


@pytest.fixture(scope="module")
def found_in_names() -> dict[str, Any]:
    return dict(as_json(names.goldens()))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with start_valkey(tmp_path_factory.mktemp("valkey"), durable=False) as url:
        return dict(as_json(scripts.goldens(url)))


@pytest.mark.parametrize("name", FROZEN["codec"])
def test_a_value_is_encoded_to_the_same_bytes_and_digest(name: str):
    assert values.goldens()[name] == FROZEN["codec"][name]


@pytest.mark.parametrize("name", FROZEN["codec"])
def test_bytes_written_then_are_read_as_the_value_they_were_made_of(name: str):
    frozen = bytes.fromhex(FROZEN["codec"][name]["bytes"])
    assert values.same(values.VALUES[name], ops.decode(frozen))
    assert ops.encode(ops.decode(frozen)) == frozen


def test_every_tag_is_frozen():
    seen: set[str] = set()

    def tag(code: int, data: bytes) -> str:
        seen.update({data.decode()} if code == 2 else ())
        return ""

    for golden in FROZEN["codec"].values():
        msgpack.unpackb(bytes.fromhex(golden["bytes"]), ext_hook=tag, strict_map_key=False)
    assert seen == ops.TYPES.keys() - ADDED.get("codec", set()), "list a new type in added.py: ADDED['codec']"


@pytest.mark.parametrize("contract", FROZEN["names"])
def test_names_and_stored_forms_are_the_same(contract: str, found_in_names: dict[str, Any]):
    found, frozen = found_in_names[contract], copy.deepcopy(FROZEN["names"][contract])
    if contract == "celery":
        for option in ADDED["broker options"]:
            del found["settings"]["broker_transport_options"][option]
        for option in ADDED["broker options gone"]:
            del frozen["settings"]["broker_transport_options"][option]
    if contract == "records":
        found = {name: [space, _without_fields(space, fields)] for name, (space, fields) in found.items()}
    assert found == frozen, (
        "restore it: other versions use these names and forms; tests/golden/added.py says what may be added"
    )


def _without_fields(namespace: str, fields: list[list[str]]) -> list[list[str]]:
    added = ADDED["record fields"].get(f"tinsmith:{namespace}:", {})
    return [[name, value] for name, value in fields if added.get(name) != value]


@pytest.mark.parametrize("name", FROZEN["names"]["records"])
def test_a_record_written_then_is_read_as_what_it_was(name: str):
    stored = dict(FROZEN["names"]["records"][name][1])
    assert load(type(names.RECORDS[name]), stored) == names.RECORDS[name]


@pytest.mark.parametrize("name", FROZEN["names"]["manifests"])
def test_a_manifest_written_then_is_read_as_what_it_was(name: str):
    assert Manifest.from_json(FROZEN["names"]["manifests"][name].encode()) == names.MANIFESTS[name]


@pytest.mark.parametrize("scenario", FROZEN["scripts"])
def test_scripts_answer_the_same_and_leave_the_same_behind(scenario: str, played: dict[str, Any]):
    steps, frozen = played[scenario], FROZEN["scripts"][scenario]
    for step, expected in zip(steps, frozen, strict=True):
        assert without_added(step) == reworded(without_gone(expected))


def test_a_random_name_is_masked_as_one_whatever_its_digits():
    assert recording.masked("payloads/run:0/1c04a8ec1795649332181a1071055522") == "payloads/run:0/<uuid>"


def reworded(step: dict[str, Any]) -> dict[str, Any]:
    """A step of ecb7b39 with today's words in the message of its refusal."""
    message = step.get("refused")
    for then, today in REWORDED.items() if message else ():
        message = message.replace(then, today)
    return {**step, "refused": message} if message else step


def without_gone(step: dict[str, Any]) -> dict[str, Any]:
    """A step of ecb7b39 without the listed keys that are not left behind any more."""
    if "keys" not in step:
        return step
    return {**step, "keys": {key: held for key, held in step["keys"].items() if key not in ADDED["keys gone"]}}


def without_added(step: dict[str, Any]) -> dict[str, Any]:
    """A step without the listed new keys, values, deletions and scripts."""
    if "keys" not in step:
        is_added = step.get("step") in ADDED["scripted steps"]
        answers = [] if is_added else [each for each in step.get("answers", ()) if each not in ADDED["script answers"]]
        if step.get("step") in ADDED["answers with content"]:
            answers = [each[:-1] if isinstance(each, list) else each for each in answers]
        return {**step, "answers": answers} if "answers" in step else step
    added, deleted = tuple(ADDED["keys left behind"]), tuple(ADDED["keys deleted"])
    kept = {
        key: held
        for key, held in step["keys"].items()
        if not key.startswith(added) and not (held is None and key.startswith(deleted))
    }
    for key, (today, then) in ADDED["values"].items():
        if key in kept and kept[key]["holds"] == today:
            kept[key] = {**kept[key], "holds": then}
    for key, held in kept.items():
        for start, fields in ADDED["record fields"].items():
            if held and key.startswith(start):
                left = {name: value for name, value in held["holds"].items() if fields.get(name) != value}
                kept[key] = {**held, "holds": left}
    return {**step, "keys": kept}


@pytest.mark.parametrize("contract", FROZEN["public"])
def test_nothing_public_is_gone_or_differs_but_what_is_listed(contract: str, found_in_public: dict[str, Any]):
    frozen, found = FROZEN["public"][contract], found_in_public[contract]
    changed = CHANGED.get(contract, {})
    assert changed.keys() <= frozen.keys(), "what was changed was there"
    assert {name: found.get(name) for name in frozen} == {**frozen, **changed}, (
        f"restore it, or list an intended change in tests/golden/added.py: CHANGED[{contract!r}], with today's value"
    )


@pytest.mark.parametrize("contract", FROZEN["public"])
def test_what_was_added_to_a_contract_is_listed(contract: str, found_in_public: dict[str, Any]):
    added = found_in_public[contract].keys() - FROZEN["public"][contract].keys()
    assert added == ADDED.get(contract, set()), f"list it in tests/golden/added.py: ADDED[{contract!r}]"


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_module_that_is_started_by_its_name_is_there(entry: str):
    assert importlib.util.find_spec(entry) is not None


def test_the_contracts_name_no_module_but_those_that_are_started():
    named = re.findall(r"\b(?:app|workers)\.[a-z_]+(?:\.[a-z_]+)*", json.dumps(FROZEN))
    assert set(named) <= set(ENTRIES)
