"""`tinsmith import`, as an operator types it, beside a trainer that reported its shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest
import redis

from app import cli
from app.domain.adapters import CONFIG_FILE, TENSORS_FILE, rows
from app.domain.records import BaseModelInfo, Checkpoint, Worker
from app.errors import Unavailable
from app.services.base_models import SHAPES as REPORT
from app.services.base_models import WEIGHTS
from app.settings import hash_key
from app.stores.objects.folder import FolderStore
from app.stores.redis.records import RedisRecords, dump, load
from tests.peft_adapters import peft_files
from tests.peft_adapters import write as write_files
from tests.unit.app.conftest import BASE, SHAPES
from tests.unit.app.services.imports import test_full_weights as full

Command = Callable[..., tuple[int, str, str]]
ALL = {**SHAPES["attn"], **SHAPES["mlp"]}


@pytest.fixture
def tinsmith(client: redis.Redis, valkey: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command on a stack with one key; returns its exit code and what it says on stdout and stderr."""
    config = tmp_path / "tinsmith.toml"
    config.write_text(
        f'data_dir = "{tmp_path}"\napi_keys = ["{hash_key("tml-one")}"]\n[redis]\nurl = "{valkey}"\n'
        f'[[base_models]]\nname = "{BASE}"\npath = "x"\nmax_rank = 8\n[base_models.full]\n'
    )
    reports = {"trainer": SHAPES, "full_trainer": {WEIGHTS: full.SHAPES}}
    for role, shapes in reports.items():
        info = BaseModelInfo(BASE, full.ARCH, 300, 64, "float32", ("attn", "mlp"))
        worker = Worker(role, BASE, asdict(info), {REPORT: rows(shapes)}, "", 0.0)
        RedisRecords(client).put(Worker.namespace, role, dump(worker))

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = cli.main([*map(str, arguments), "--config", str(config)])
        said = capsys.readouterr()
        return code, said.out.strip(), said.err.strip()

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


def checkpoint(client: redis.Redis, path: str) -> Checkpoint:
    stored = RedisRecords(client).get(Checkpoint.namespace, path)
    assert stored is not None
    return load(Checkpoint, stored)


def test_an_adapter_becomes_a_checkpoint_of_the_only_project(
    tinsmith: Command, client: redis.Redis, folder: Path, tmp_path: Path
) -> None:
    files = peft_files(ALL, 4)
    code, path, said = tinsmith("import", write_files(folder, files), "--base-model", BASE)
    assert (code, said) == (0, "")
    found = checkpoint(client, path)
    assert (found.owner, found.base_model, found.kind) == (hash_key("tml-one")[:16], BASE, "external_weights")
    assert (found.lora["rank"], found.lora["alpha"], found.lora["train_unembed"]) == (4, 8.0, False)
    store = FolderStore(tmp_path / "objects", "", "http://x")
    assert store.read(f"{found.prefix}/{TENSORS_FILE}") == files[TENSORS_FILE]
    config = json.loads(store.read(f"{found.prefix}/{CONFIG_FILE}"))
    assert config["base_model_name_or_path"] == BASE, "the file of the folder names a place on another machine"


def test_all_weights_of_a_model_become_a_full_checkpoint(tinsmith: Command, client: redis.Redis, folder: Path) -> None:
    code, path, said = tinsmith("import", full.write(folder, full.IN_FILES), "--base-model", BASE)
    assert (code, said) == (0, "")
    found = checkpoint(client, path)
    assert (found.full, found.merged, found.files) == (True, False, ["config.json", "model.safetensors"])


def test_the_project_is_chosen_where_there_are_several_and_its_storage_counted(tinsmith: Command, folder: Path) -> None:
    organisation = tinsmith("admin", "org", "create", "Tinkers")[1]
    project = tinsmith("admin", "project", "create", "kettles", "--org", organisation)[1]
    command = ("import", write_files(folder, peft_files(ALL, 4)), "--base-model", BASE)
    code, _, said = tinsmith(*command)
    assert (code, project in said and "--project" in said) == (2, True)
    assert tinsmith(*command, "--project", "nobody")[0] == 2
    assert tinsmith(*command, "--project", project)[0] == 0
    tinsmith("admin", "limits", "set", project, "--storage-bytes", "10")
    code, _, said = tinsmith(*command, "--project", project)
    assert (code, "storage_bytes" in said) == (2, True)
    assert "operator" in tinsmith("admin", "audit", project)[1]


def test_an_import_that_fails_midway_leaves_its_room_to_the_next(
    tinsmith: Command, client: redis.Redis, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    organisation = tinsmith("admin", "org", "create", "Tinkers")[1]
    project = tinsmith("admin", "project", "create", "kettles", "--org", organisation)[1]
    adapter = write_files(folder, peft_files(ALL, 4))
    command = ("import", adapter, "--base-model", BASE, "--project", project)
    first = checkpoint(client, tinsmith(*command)[1])
    tinsmith("admin", "limits", "set", project, "--storage-bytes", f"{5 * first.size_bytes // 2}")
    with monkeypatch.context() as outage:
        outage.setattr(FolderStore, "put_new", Mock(side_effect=Unavailable("the disk is full")))
        assert tinsmith(*command)[0] == 1
    assert checkpoint(client, tinsmith(*command)[1]).size_bytes == first.size_bytes
    code, _, said = tinsmith(*command)
    assert (code, "storage_bytes" in said) == (2, True)


def test_a_folder_that_is_refused_is_one_line_and_exit_code_2(
    tinsmith: Command, client: redis.Redis, folder: Path
) -> None:
    cases = {
        "use_dora": peft_files(ALL, 4, use_dora=True),
        "rank 9": peft_files(ALL, 9),
        "no adapter_model.safetensors": {"adapter_config.json": b"{}", "adapter_model.bin": b"a pickle"},
    }
    for words, files in cases.items():
        for old in folder.iterdir():
            old.unlink()
        code, out, said = tinsmith("import", write_files(folder, files), "--base-model", BASE)
        assert (code, out, words in said, said.count("\n")) == (2, "", True, 0), said
    assert tinsmith("import", folder / "nowhere", "--base-model", BASE)[2].endswith(
        "there is no such folder; correct the path"
    )
    assert "org/else" in tinsmith("import", folder, "--base-model", "org/else")[2]
    assert list(RedisRecords(client).list(Checkpoint.namespace)) == []


def test_without_a_trainer_it_can_be_tried_again(tinsmith: Command, client: redis.Redis, folder: Path) -> None:
    RedisRecords(client).delete(Worker.namespace, "trainer")
    code, _, said = tinsmith("import", write_files(folder, peft_files(ALL, 4)), "--base-model", BASE)
    assert (code, "try again soon" in said) == (1, True)
