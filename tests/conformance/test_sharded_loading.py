"""At ZeRO stage 3 a rank reads its share of the base, and never holds the whole. The bits are an ordinary load's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.settings import BaseModelSettings
from tests import packed_checkpoints
from tests.conformance import sharded_ranks
from tests.conformance.groups import run_group
from tests.parity import architectures

TRAINER: Mapping[str, Any] = {"backend": "deepspeed", "zero_stage": 3, "ranks": 2}
PACKED: Mapping[str, Callable[[Path], Any]] = {
    "gpt-oss": packed_checkpoints.mxfp4,
    "deepseek-v3": packed_checkpoints.fp8,
    "glm4-moe": packed_checkpoints.nvfp4,
}


def head_stored_too(folder: Path, change: float) -> None:
    """Stores the head of a model whose configuration ties it to the embedding, plus `change`."""
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + change
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Every family, packed checkpoints, and heads that are stored although they are tied."""
    folder = tmp_path_factory.mktemp("bases")
    found = [architectures.build(case, folder / case) for case in architectures.CASES]
    for case, pack in PACKED.items():
        found.append(Path(shutil.copytree(folder / case, folder / f"{case}, packed")))
        pack(found[-1])
    for name, change in (("same", 0.0), ("another", 1.0)):
        found.append(Path(shutil.copytree(folder / "llama, tied head", folder / f"llama, {name} head stored")))
        head_stored_too(found[-1], change)
    return found


def test_every_family_has_the_bits_ties_and_buffers_of_the_ordinary_load(bases: list[Path], tmp_path: Path) -> None:
    settings = [
        BaseModelSettings(name=base.name, path=str(base), dtype=dtype, trainer=TRAINER).model_dump(mode="json")
        for base in bases
        for dtype in ("float32", "bfloat16")
    ]
    assert run_group(sharded_ranks.compare, json.dumps(settings), str(tmp_path)) == [0, 0]
    for rank in "01":
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) == 2 * len(bases)
        assert {name: one for name, one in found.items() if one} == {}


_WIDE = {"hidden_size": 1024, "intermediate_size": 4096}
_EXPERTS = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}


@pytest.mark.parametrize(
    ("case", "shape", "dtype", "offload"),
    [
        ("qwen3", {**_WIDE, "num_hidden_layers": 6}, "float32", False),
        ("qwen3", {**_WIDE, "num_hidden_layers": 12}, "bfloat16", True),
        ("mixtral", _EXPERTS, "float32", False),  # each expert has files' tensors of its own
        ("gpt-oss", _EXPERTS, "float32", False),  # packed
    ],
    ids=["as stored", "cast", "separate experts", "packed"],
)
def test_no_rank_holds_the_whole_base_while_it_loads(
    case: str, shape: Mapping[str, int], dtype: str, offload: bool, tmp_path: Path
) -> None:
    """Of 309 MB. A rank takes 0.53 to 0.68 of it, and took 1.0 to 1.5 when DeepSpeed split the weights once all were
    read."""
    base = architectures.build(case, tmp_path / "base", **shape)
    whole = (base / "model.safetensors").stat().st_size * (1 if dtype == "float32" else 0.5)
    if case in PACKED:
        PACKED[case](base)
    trainer = {**TRAINER, "offload": offload}
    settings = BaseModelSettings(name="large", path=str(base), dtype=dtype, trainer=trainer)
    assert run_group(sharded_ranks.measure, settings.model_dump_json(), str(tmp_path)) == [0, 0]
    most = [int((tmp_path / rank).read_text()) for rank in "01"]
    assert whole / 2 < min(most) and max(most) < 0.75 * whole, (most, whole)


@pytest.mark.parametrize(
    ("case", "shape"),
    [("qwen3", {**_WIDE, "num_hidden_layers": 6}), ("mixtral", _EXPERTS)],
    ids=["dense", "separate experts"],
)
def test_no_rank_reads_all_weights_at_once_for_a_full_fine_tune(
    case: str, shape: Mapping[str, int], tmp_path: Path
) -> None:
    """Of 309 MB in fp32. A rank takes 1.4 to 1.5 of that and keeps it, its half of masters and moments. It took 2.0."""
    base = architectures.build(case, tmp_path / "base", **shape)
    file = base / "model.safetensors"
    whole = file.stat().st_size
    save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file, metadata={"format": "pt"})
    settings = BaseModelSettings(name="large", path=str(base), dtype="bfloat16", trainer=TRAINER)
    assert run_group(sharded_ranks.measure_full, settings.model_dump_json(), str(tmp_path)) == [0, 0]
    most = [int((tmp_path / rank).read_text()) for rank in "01"]
    assert 1.3 * whole < min(most) and max(most) < 1.7 * whole, (most, whole)
