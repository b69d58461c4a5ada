"""Hostile names, paths and ids: only objects of the caller's own run are requested from the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from app.errors import BadRequest
from app.stores.objects.folder import FolderStore
from tests.http_server import Handler, serving
from tests.unit.app.api.test_models import save_checkpoint
from tests.unit.app.api.test_sampling import body as sample
from tests.unit.app.conftest import BASE, Api, batch

EVIL = [
    "..",
    ".",
    "../..",
    "../../etc/passwd",
    "/etc/passwd",
    "a/../../b",
    "a/b",
    "%2e%2e",
    "..%2f..",
    "\x00",
    "a\x00b",
]
EVIL += ["\uff0e\uff0e", "\u2025", "a\u202eb", "\uff41", "a\nb", "a b", " ", "~root", ".hidden", "-rf", "C:\\x"]
EVIL += ["file:///etc/passwd", "http://127.0.0.1/", "tinker://..", "*", "a;b", "$(id)", "a?b=c", "a#b", "x" * 10_000]
HARMLESS_KEYS = ("a/b", "-rf")
METHODS = ("put_new", "get", "read", "list", "delete", "presign")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records every key and prefix requested from the object store, which works as usual."""
    seen: list[str] = []

    def recording(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def recorded(store: FolderStore, keys: Any, *rest: Any) -> Any:
            keys = [keys] if isinstance(keys, str) else list(keys)
            seen.extend(keys)
            return method(store, keys if method.__name__ == "delete" else keys[0], *rest)

        return recorded

    for name in METHODS:
        monkeypatch.setattr(FolderStore, name, recording(getattr(FolderStore, name)))
    return seen


def attacks(api: Api, evil: str) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """(method, path, body) of every call that takes a name, a path or an id, with `evil` in its place."""
    model, sampler, session = api.model(), api.sampler(), api.session()
    for path in (evil, f"tinker://{model}/weights/{evil}", f"tinker://{model}/{evil}/a", f"tinker://{evil}/weights/a"):
        yield "POST", "load_weights", {"model_id": model, "seq_id": 1, "path": path}
        yield "POST", "load_weights", {"session_id": session, "model_seq_id": 1, "path": path}
        asked = {"session_id": session, "sampling_session_seq_id": 1}
        yield "POST", "create_sampling_session", {**asked, "model_path": path}
    yield "POST", "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1, "base_model": evil}
    yield "POST", "create_model", {"session_id": session, "model_seq_id": 2, "base_model": evil}
    for seq, route in enumerate(("save_weights", "save_weights_external", "save_weights_for_sampler"), 2):
        yield "POST", route, {"model_id": model, "seq_id": seq, "path": evil}
    asked_for = {"session_heartbeat": "session_id", "get_info": "model_id", "retrieve_future": "request_id"}
    for route, field in asked_for.items():
        yield "POST", route, {field: evil}
    yield "POST", "asample", sample(f"{sampler}/{evil}")
    part = quote(evil, safe="%")
    for run, checkpoint in ((part, "weights/a"), (model, f"weights/{part}"), (model, f"{part}/a")):
        yield "GET", f"training_runs/{run}/checkpoints/{checkpoint}/external_weights_urls", None
        yield "PUT", f"training_runs/{run}/checkpoints/{checkpoint}/ttl", {"ttl_seconds": None}
        yield "DELETE", f"training_runs/{run}/checkpoints/{checkpoint}", None
    yield "GET", f"objects/{part}?expires=1&signature=x", None
    yield "GET", f"archives/{part}?expires=1&signature=x", None
    yield "GET", f"samplers/{part}", None
    yield "DELETE", f"training_runs/{part}", None


@pytest.mark.parametrize("evil", EVIL, ids=range(len(EVIL)))
def test_a_hostile_name_is_refused_and_no_object_is_touched(api: Api, asked: list[str], evil: str) -> None:
    for method, path, body in attacks(api, evil):
        answer = api.client.open(f"/api/v1/{path}", method=method, json=body, headers={"X-API-Key": api.key})
        # Werkzeug redirects a path with two slashes to the one with one, and an empty part to the collection's own
        # route.
        assert answer.status_code in (400, 403, 404, 405, 422, 308), (method, path, body, answer.text)
    assert asked == []


def test_the_record_holds_what_an_honest_call_asks_for(api: Api, asked: list[str]) -> None:
    model = api.model()
    own = f"models/{model}/weights/a/"
    save_checkpoint(api, model, prefix=f"{own}1-1")
    headers = {"X-API-Key": api.key}
    assert api.client.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/a", headers=headers).status_code == 200
    assert asked
    assert all(key.startswith(own) for key in asked)


@pytest.mark.parametrize("evil", [evil for evil in EVIL if evil not in HARMLESS_KEYS], ids=repr)
def test_a_folder_store_takes_no_key_that_leads_out_of_it(tmp_path: Path, evil: str) -> None:
    store = FolderStore(tmp_path / "objects", "secret", "http://localhost")
    for key in (evil, f"models/{evil}", f"models/{evil}/a"):
        with pytest.raises(BadRequest):
            store.read(key)
        with pytest.raises(BadRequest):
            store.put_new(key, b"")
        with pytest.raises(BadRequest):
            store.presign(key, 60)


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """(URL, paths) of a server that records every request."""
    paths: list[str] = []

    class Noting(Handler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_error(404)

        do_HEAD = do_PUT = do_POST = do_GET

    with serving(Noting) as url:
        yield f"{url}/x", paths


def test_nothing_in_a_request_makes_the_server_fetch_anything(api: Api, elsewhere: tuple[str, list[str]]) -> None:
    url, paths = elsewhere
    model, session = api.model(), api.session()
    pointer = {"type": "image_asset_pointer", "location": url, "format": "png"}
    datum = {"model_input": {"chunks": [pointer]}, "loss_fn_inputs": {}}
    pictured = {"type": "image_url", "image_url": {"url": url}}
    refused = [
        api.post("asample", sample(api.sampler(), prompt={"chunks": [pointer]})),
        api.post("asample", sample(api.sampler(), prompt={"chunks": [{"type": "image", "data": url}]})),
        api.post("forward_backward", {"model_id": model, "seq_id": 1, "forward_backward_input": {"data": [datum]}}),
        api.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": url}),
        api.post("load_weights", {"session_id": session, "model_seq_id": 0, "path": url}),
        api.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": url}),
        api.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": url}),
        _chat(api, url, "hi"),
        _chat(api, BASE, [pictured]),
    ]
    message = batch(model, 2)
    message.data[0].model_input.add().image.data = url.encode()
    refused.append(api.forward_backward(message))
    assert [answer.status_code for answer in refused if not 400 <= answer.status_code < 500] == []
    assert paths == []


def _chat(api: Api, model: str, content: Any) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": content}]}
    return api.client.post("/oai/api/v1/chat/completions", json=body, headers={"X-API-Key": api.key})
