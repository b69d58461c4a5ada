"""Tokenizers of the SDK and the cookbook, on a machine that reaches only the API and shares no folder with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer

from app.domain.records import Model
from app.domain.results import Result
from app.stores.redis.types import OwnedElsewhere
from tests.api_server import BASE, KEY, ApiServer, start_api
from tests.confined import surroundings
from tests.contract.awaiting import await_true
from tests.contract.hub_client import tokens
from tests.models import tiny_qwen3


def make_ready(server: ApiServer) -> None:
    """Makes the first requested model, as a trainer would."""
    await_true(lambda: list(server.records.list(Model.namespace)), "no model was asked for")
    [(model_id, _)] = server.records.list(Model.namespace)
    lease = server.oplog.acquire(model_id, "node/test")
    assert not isinstance(lease, OwnedElsewhere)
    await_true(lambda: server.oplog.next(lease, 0), "it was not journalled")
    server.oplog.commit(lease, 0, Result(json.dumps({"model_id": model_id}).encode()), [])


def test_the_sdks_and_the_cookbooks_tokenizers_are_the_base_models(tmp_path: Path):
    # The API of the test uses its own folder as its base model.
    folder = tiny_qwen3(tmp_path / "server")
    with start_api(folder, 'public_url = "http://tinsmith.example.org"') as server:
        client = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.hub_client", server.url, KEY, BASE],
            env=surroundings(server.url, tmp_path / "home", hidden=folder),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        make_ready(server)
        printed, said = client.communicate(timeout=600)
    assert client.returncode == 0, said
    assert json.loads(printed) == [tokens(AutoTokenizer.from_pretrained(folder))] * 3
