"""Small bodies that expand to huge ones: a real server refuses them at once, and its memory stays the same."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import zstandard

from app.domain.adapters import FILES, rows
from app.domain.records import Worker
from app.services import base_models
from app.stores.redis.records import dump
from tests import pictures
from tests.api_server import BASE, INFO, KEY, ApiServer, start_api
from tests.peft_adapters import PEFT_CONFIG
from tests.protobuf_bytes import field, with_tensor
from tests.unit.app.conftest import SHAPES, batch

MOST_MIB, LEFT_MIB = 64, 8
_BODY = 16 * 2**20
PROTOBUF, JSON = "application/x-protobuf", "application/json"
MATRICES = [f"matrix_{i}" for i in range(15)]
PLAIN: Mapping[str, str] = {}
ZSTD, GZIP = {"Content-Encoding": "zstd"}, {"Content-Encoding": "gzip"}
# The content's size in the head of a zstd frame, and an empty last block.
LARGE, NEAR = (2**62).to_bytes(8, "little") + b"\x01\x00\x00", _BODY.to_bytes(4, "little") + b"\x01\x00\x00"
SETTINGS = f"max_body_bytes = {_BODY}\nspare_threads = 8\npoll_capacity = 8"


@dataclass
class Server:
    api: ApiServer
    process: psutil.Process

    def post(
        self, route: str, body: bytes | Iterator[bytes], kind: str = JSON, encoding: Mapping[str, str] = PLAIN
    ) -> tuple[int, dict[str, str]]:
        """Returns (status, JSON body) of a POST; an iterator is sent in chunks, without a length."""
        headers = {"X-API-Key": KEY, "Content-Type": kind, **encoding}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.api.port, timeout=120)) as connection:
            # The server may answer, and close, before all was sent.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request("POST", f"/api/v1/{route}", body, headers, encode_chunked=True)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def put(self, path: str, body: bytes | Iterator[bytes]) -> int:
        """Returns the status of a PUT without a key; an iterator is sent in chunks, without a length."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.api.port, timeout=120)) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request("PUT", path, body, encode_chunked=True)
            return connection.getresponse().status

    def model(self) -> str:
        session = self.post("create_session", b"{}")[1]["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
        return self.post("create_model", json.dumps(asked).encode())[1]["model_id"]

    def custom_loss(self) -> str:
        """The id of a custom loss that takes MATRICES."""
        inputs = [{"name": "logprobs", "rank": 1}, *({"name": name, "rank": 2} for name in MATRICES)]
        nodes = [{"op": "placeholder", "name": each["name"], "target": each["name"]} for each in inputs]
        nodes.append({"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "logprobs"}]})
        nodes.append({"op": "output", "name": "output", "target": "output", "args": [[{"ref": "total"}, {"dict": {}}]]})
        session = self.post("create_session", b"{}")[1]["session_id"]
        asked = {"session_id": session, "custom_loss_seq_id": 1, "name": "sum", "inputs": inputs}
        graph = {"format": 1, "nodes": nodes}
        promised = self.post("create_custom_loss", json.dumps({**asked, "graph": graph}).encode())[1]
        return self.post("retrieve_future", json.dumps({"request_id": promised["request_id"]}).encode())[1]["loss_id"]

    def peak_mib(self) -> float:
        """Peak memory of the process, in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def used_mib(self) -> float:
        """Memory of the process now, in MiB."""
        return self.process.memory_info().rss / 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_api(
        tmp_path_factory.mktemp("api"), f"max_body_bytes = {_BODY}\nspare_threads = 8\npoll_capacity = 8"
    ) as api:
        (process,) = psutil.Process(api.pid).children()
        yield Server(api, process)


def zeros(size: int, *, sized: bool) -> bytes:
    """A zstd frame of so many zeros, with or without its size."""
    packer = zstandard.ZstdCompressor(write_content_size=sized).compressobj(size=size if sized else -1)
    piece = bytes(2**20)
    return b"".join([*(packer.compress(piece) for _ in range(size // 2**20)), packer.flush()])


def endless() -> Iterator[bytes]:
    """More bytes than the server ever accepts."""
    for _ in range(4 * _BODY // 2**16):
        yield bytes(2**16)


def with_images(model: str, count: int, side: int, tokens: int) -> bytes:
    """A batch of one datum with images that say that they are `side` pixels wide and high."""
    message = batch(model, 1)
    image = message.data[0].model_input.add().image
    image.data, image.format, image.expected_tokens = pictures.stated(side, side), "png", tokens
    message.data[0].model_input.extend([message.data[0].model_input[1]] * (count - 1))
    return message.SerializeToString()


def unfolding(model: str, loss_id: str) -> bytes:
    """A batch of one token for the custom loss: 15 matrices without values, of 32 MiB each when dense."""
    message = batch(model, 1, tokens=[1], loss_fn="custom", target_tokens=[2])
    message.loss_fn_config_v2["loss_id"].text = loss_id
    for name in MATRICES:
        tensor = message.data[0].loss_fn_inputs[name]
        tensor.dtype, tensor.sparse_csr.crow_indices = 2, bytes(16)
        tensor.shape.extend([1, 2**22])
    return message.SerializeToString()


def bombs(model: str) -> dict[str, tuple[str, bytes, str, Mapping[str, str]]]:
    keys = json.dumps({f"k{i}": i for i in range(10**6)}).encode()
    sparse = batch(model, 1)
    tensor = sparse.data[0].loss_fn_inputs["target_tokens"]
    tensor.Clear()
    tensor.dtype, tensor.sparse_csr.crow_indices = 2, bytes(16)
    tensor.shape.extend([1, 2**40])
    sizes, tokens = with_images(model, 1, 2**31 - 1, 6), with_images(model, 1, 2, 2**31 - 1)
    return {
        "zstd that says it is 128 MiB": ("forward_backward", zeros(2**27, sized=True), PROTOBUF, ZSTD),
        "zstd that does not say": ("forward_backward", zeros(2**27, sized=False), PROTOBUF, ZSTD),
        "zstd on a small route": ("session_heartbeat", zeros(2**27, sized=False), JSON, ZSTD),
        "a million zstd frames": ("forward_backward", zstandard.compress(b"") * 10**6, PROTOBUF, ZSTD),
        "a million frames to skip": ("forward_backward", (b"\x50\x2a\x4d\x18" + bytes(4)) * 10**6, PROTOBUF, ZSTD),
        "zstd that says it is 2^62 bytes": ("forward_backward", b"\x28\xb5\x2f\xfd\xe0" + LARGE, PROTOBUF, ZSTD),
        "zstd that says too much": ("forward_backward", b"\x28\xb5\x2f\xfd\xa0" + NEAR, PROTOBUF, ZSTD),
        "zstd in zstd": ("forward_backward", zstandard.compress(zeros(2**27, sized=False)), PROTOBUF, ZSTD),
        "gzip": ("forward_backward", gzip.compress(bytes(10**7), 1), PROTOBUF, GZIP),
        "gzip as JSON": ("asample", gzip.compress(b"[" * 10**7, 1), JSON, GZIP),
        "depth 10^5": ("asample", b"[" * 10**5 + b"]" * 10**5, JSON, PLAIN),
        "depth 900": ("create_session", b'{"user_metadata": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}", JSON, PLAIN),
        "10^6 keys": ("asample", keys, JSON, PLAIN),
        "10^6 keys on a small route": ("create_session", keys, JSON, PLAIN),
        "4 million lists": ("forward_backward", b"[" + b"[]," * 4 * 10**6 + b"[]]", JSON, PLAIN),
        "a long number": ("asample", b'{"seq_id": ' + b"9" * 10**6 + b"}", JSON, PLAIN),
        "1e309": ("optim_step", b'{"model_id": "m", "seq_id": 1, "adam_params": {"eps": 1e309}}', JSON, PLAIN),
        "2^63 tokens": ("asample", b'{"sampling_session_id": "s", "seq_id": 9223372036854775808}', JSON, PLAIN),
        "a body over the limit": ("asample", b" " * (_BODY + 1), JSON, PLAIN),
        "a protobuf that names 2^40 elements": ("forward_backward", sparse.SerializeToString(), PROTOBUF, PLAIN),
        "a PNG that is 2^31 pixels wide": ("forward_backward", sizes, PROTOBUF, PLAIN),
        "an image of 2^31 tokens": ("forward_backward", tokens, PROTOBUF, PLAIN),
        "2,000 images of 2^14 tokens": ("forward_backward", with_images(model, 2000, 2, 2**14), PROTOBUF, PLAIN),
    }


def crowds(model: str) -> dict[str, bytes]:
    """Batches that are small when packed."""
    head, shaped = batch(model, 1), batch(model, 1)
    del head.data[:]
    shaped.data[0].loss_fn_inputs["target_tokens"].shape.extend([2**31] * 200_000)
    made = {
        "2 million datums": b"\x1a\x00" * 2**21,
        "2 million chunks": b"\x1a\x80\x80\x80\x02" + b"\x0a\x00" * 2**21,
        "50,000 datums": head.SerializeToString() + b"\x1a\x00" * 50_000,
        "a shape of 200,000 sizes": shaped.SerializeToString(),
        "a shape of 15 million sizes": with_tensor(field(4, b"\x01" * 15 * 10**6)),
        "a chunk of 7 million kinds": field(3, field(1, b"\x0a\x00\x12\x00" * (7 * 10**6 // 2))),
        "a tensor of 3 million encodings": with_tensor(b"\x0a\x00\x12\x00" * 3 * 10**6),
        "a million groups in each other": b"\x0b" * 10**6,
    }
    return {name: zstandard.compress(body) for name, body in made.items()}


def test_no_bomb_goes_off(server: Server) -> None:
    model = server.model()
    made = bombs(model)
    # The first batch loads code; only the bomb's own memory is measured.
    assert server.post("forward_backward", batch(model, 2).SerializeToString(), PROTOBUF)[0] == 200
    made["15 sparse matrices of 32 MiB"] = ("forward_backward", unfolding(model, server.custom_loss()), PROTOBUF, PLAIN)
    before, used = server.peak_mib(), server.used_mib()
    answers = {name: server.post(route, body, *rest) for name, (route, body, *rest) in made.items()}
    answers["chunks without end"] = server.post("asample", endless())
    grown, left = server.peak_mib() - before, server.used_mib() - used
    assert {name: status for name, (status, _) in answers.items() if status not in (400, 413, 422)} == {}
    assert (answers["chunks without end"][0], answers["a body over the limit"][0]) == (413, 413)
    assert all(answer["detail"] for _, answer in answers.values())
    assert grown < MOST_MIB
    assert left < LEFT_MIB
    print(f"\n{len(answers)} bombs, {grown:.1f} MiB more at the peak, {left:.1f} after them")


def test_many_parts_in_few_bytes_are_refused_before_they_are_made(server: Server) -> None:
    before, model = server.peak_mib(), server.model()
    answers = {name: server.post("forward_backward", body, PROTOBUF, ZSTD) for name, body in crowds(model).items()}
    assert {name: status for name, (status, _) in answers.items()} == {
        "2 million datums": 413,
        "2 million chunks": 413,
        "50,000 datums": 400,
        "a shape of 200,000 sizes": 400,
        "a shape of 15 million sizes": 413,
        "a chunk of 7 million kinds": 413,
        "a tensor of 3 million encodings": 413,
        "a million groups in each other": 413,
    }
    assert server.peak_mib() - before < MOST_MIB


def test_an_upload_takes_no_more_than_its_adapter_can_have(server: Server) -> None:
    worker = Worker("trainer", BASE, asdict(INFO), {base_models.SHAPES: rows(SHAPES)}, "", time.time())
    server.api.records.put(Worker.namespace, "trainer-0@test", dump(worker))
    asked = {"base_model": BASE, "lora_config": {"rank": 4, "train_unembed": False}}
    status, started = server.post("external_weights_upload_start", json.dumps(asked).encode())
    assert status == 200, started
    config, tensors = (urlsplit(started["urls"][name]) for name in FILES)
    before = server.peak_mib()
    assert server.put(f"{config.path}?{config.query}", endless()) == 413
    assert server.put(f"{tensors.path}?{tensors.query}", bytes(_BODY)) == 413
    deep = b"[" * 60_000
    for header in ((2**62).to_bytes(8, "little"), len(deep).to_bytes(8, "little") + deep):
        assert server.put(f"{config.path}?{config.query}", json.dumps({**PEFT_CONFIG, "r": 4}).encode()) == 200
        assert server.put(f"{tensors.path}?{tensors.query}", header) == 200
        status, refused = server.post(
            "external_weights_upload_finish", json.dumps({"upload_id": started["upload_id"]}).encode()
        )
        assert (status, "safetensors" in refused["detail"]) == (400, True)
    assert server.peak_mib() - before < MOST_MIB


def test_the_server_works_after_them(server: Server) -> None:
    assert server.post("create_session", b'{"tags": ["a"]}')[0] == 200
