"""Uploaded weights with broken headers are refused as the safetensors library would, and nothing is changed."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from app.domain.adapters import CONFIG_FILE, TENSORS_FILE
from app.errors import BadRequest
from app.services.imports.safetensors import read_shapes
from tests.unit.app.api.test_uploads import FILES, finish, put, staged, start
from tests.unit.app.conftest import Api

RUNS, UPLOADS = 3000, 60
MOST_HEADER = 2**16
PLACES = (0, 1, 3, 4, 12, 24, -4, 2**31, 2**63 - 8, 2**63, 2**64, 1.5, True, None, "4", [], {})
NAMES = ("a", "b", "__metadata__", "", "\x00", "../x", "\ud800", "\U0001f600", "a" * 5000)
DTYPES = ("F32", "F16", "BF16", "F64", "I64", "BOOL", "F8_E4M3", "f32", "", None, 4, ["F32"], {"F32": 1})
SHAPES = ([], [0], [1], [2, 3], [2**32, 2**32], [2**63], [-1], [1] * 9, [1.0], [True], [None], None, "1", {"0": 1})
TEXTS = ("NaN", "-0", "1e400", "Infinity", '"\\ud800"', "[" * 500 + "]" * 500, "9" * 5000, "\x00", "\xff")


def header(draw: random.Random) -> dict[str, Any]:
    """A valid header of up to three tensors that lie end to end."""
    made, end = {}, 0
    for name in draw.sample(("a", "b", "c"), draw.randrange(4)):
        shape = draw.choice(([2, 3], [6], [0, 4], []))
        size = 4 * (6 if shape in ([2, 3], [6]) else 0 if shape else 1)
        made[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return made


def spoilt(draw: random.Random) -> bytes:
    """A file with none to three faults: in its header's values, in its header's text, or in its lengths."""
    made = header(draw)
    size = max((entry["data_offsets"][1] for entry in made.values()), default=0)
    for _ in range(draw.randrange(3)):
        _spoil(made, draw)
    text = json.dumps(made).encode("utf-8", "surrogatepass")
    if draw.random() < 0.3:
        place = draw.randrange(len(text) + 1)
        text = text[:place] + draw.choice(TEXTS).encode("latin-1") + text[place + draw.randrange(9) :]
    if made and draw.random() < 0.1:
        name = next(iter(made))
        text = json.dumps({name: made[name]}).encode("utf-8", "surrogatepass")[:-1] + b", " + text[1:]
    if draw.random() < 0.1:
        text = text.decode("latin-1").encode("utf-16")
    length = draw.choice((len(text),) * 8 + (0, 1, len(text) - 1, len(text) + 1, 2**40, 2**64 - 1))
    data = bytes(max(0, size + draw.choice((0,) * 8 + (-1, 1, 4, 1000))))
    return (max(0, length).to_bytes(8, "little") + text + data)[: draw.choice((None,) * 9 + (7, 9, 20))]


def _spoil(made: dict[str, Any], draw: random.Random) -> None:
    name = draw.choice([*made, *NAMES])
    entry = made.get(name)
    if not isinstance(entry, dict) or draw.random() < 0.2:
        made[name] = draw.choice((*PLACES, {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, {"format": "pt"}))
    elif (field := draw.choice(("dtype", "shape", "data_offsets", "other"))) == "data_offsets":
        entry[field] = [draw.choice(PLACES) for _ in range(draw.choice((2, 2, 2, 0, 3)))]
    else:
        entry[field] = draw.choice(DTYPES if field == "dtype" else SHAPES)


def test_only_what_the_library_reads_is_taken_with_the_same_shapes_in_little_memory(tmp_path: Path) -> None:
    file, taken, most = tmp_path / "x.safetensors", 0, 0
    tracemalloc.start()
    try:
        for seed in range(RUNS):
            file.write_bytes(content := spoilt(random.Random(seed)))
            tracemalloc.reset_peak()
            held, _ = tracemalloc.get_traced_memory()
            try:
                found = read_shapes(file, MOST_HEADER)
            except BadRequest as refusal:
                assert len(str(refusal)) < 1000
                continue
            finally:
                most = max(most, tracemalloc.get_traced_memory()[1] - held)
            taken += 1
            assert {name: tensor.shape for name, tensor in load_file(file).items()} == found, (seed, content)
    finally:
        tracemalloc.stop()
    assert most < 16 * MOST_HEADER
    assert RUNS / 20 < taken < RUNS


def test_a_refused_upload_changes_nothing_and_may_be_sent_again(api: Api) -> None:
    started = start(api).json
    urls, upload_id = started["urls"], started["upload_id"]
    assert put(api, urls[CONFIG_FILE], FILES[CONFIG_FILE]).status_code == 200
    for seed in range(UPLOADS):
        content = spoilt(random.Random(seed))
        assert put(api, urls[TENSORS_FILE], content).status_code == 200
        before = api.services.objects.list(""), api.get("limits").json
        refused = finish(api, upload_id)
        assert refused.status_code == 400, (seed, content, refused.json)
        assert TENSORS_FILE in refused.json["detail"]
        assert (api.services.objects.list(""), api.get("limits").json) == before
    assert api.get("checkpoints").json["checkpoints"] == []
    assert put(api, urls[TENSORS_FILE], FILES[TENSORS_FILE]).status_code == 200
    assert finish(api, upload_id).status_code == 200
    assert staged(api) == []
