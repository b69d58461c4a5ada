"""A served stack fits on its device, and the bench of sampling measures the samplers' steps, not the client's calls."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.settings import BaseModelSettings
from ops.bench import bare_vllm, sampling, side
from ops.bench.bare_sampler import requests
from ops.bench.report import Outcome
from ops.gpu_check import serving, shapes
from tests.models import tiny_qwen3


@pytest.mark.parametrize(("gpu", "tokens"), [(True, 1024), (False, 64)])
def test_a_gpu_draws_a_thousand_tokens_a_sample(gpu: bool, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    given: list[int] = []

    def measured(folder: Path, base: BaseModelSettings, rounds: int, tokens: int) -> Outcome:
        given.append(tokens)
        return Outcome({}, ())

    monkeypatch.setattr(sampling, "measured", measured)
    serving.BENCHES["sampling"](Path(), BaseModelSettings(name="n", path="~/m"))
    assert given == [tokens]
    assert {request.max_tokens for request in requests(100, tokens)} == {tokens}


def test_both_sides_draw_as_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bare side has them as an argument, and the SDK's side as a parameter of its samples."""
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    given: list[Any] = []

    @contextmanager
    def running(*arguments: Any) -> Any:
        given.append(arguments[-1])
        yield SimpleNamespace(measure=lambda count: {"four each": [2.0], "single": [2.0]})

    def sample(prompt: Any, count: int, params: Any) -> Any:
        given.append(str(params.max_tokens))
        sequences = [SimpleNamespace(tokens=[0] * params.max_tokens)] * count
        return SimpleNamespace(result=lambda: SimpleNamespace(sequences=sequences))

    @contextmanager
    def nothing(*_: Any, **__: Any) -> Any:
        yield SimpleNamespace(url="")

    monkeypatch.setattr(side, "running", running)
    monkeypatch.setattr(sampling.servers, "running_stack", nothing)
    monkeypatch.setattr(sampling.tinker, "ServiceClient", nothing)
    monkeypatch.setattr(sampling, "_sampling_client", lambda *_: SimpleNamespace(sample=sample))
    base = BaseModelSettings(name="n", path=str(tmp_path))
    figures = sampling.measured(tmp_path, base, 1, 1024).figures
    assert {*given} == {"1024"} and figures["tokens"] == 64 * 1024


def test_a_stack_has_a_short_context_and_the_rank_of_its_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For more, vLLM needs more than its share of a GPU. The memory that the model was made in is free by then."""
    calls: list[Any] = []

    def measured(folder: Path, base: BaseModelSettings) -> Outcome:
        calls.append((folder.is_dir(), base.path, base.max_context, base.max_rank))
        return Outcome({"rounds": 1}, ())

    def save(size: str, path: Path, device: torch.device) -> None:
        path.mkdir()
        calls.append(size)

    monkeypatch.setattr(shapes, "save", save)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("freed"))
    monkeypatch.setitem(serving.BENCHES, "handover", measured)
    serving.main("handover", "8B", str(tmp_path / "model"), str(tmp_path / "data"))
    assert calls == ["8B", "freed", (True, str(tmp_path / "model"), 4096, 32)]
    assert json.loads(capsys.readouterr().out) == {"rounds": 1, "goals": []}


@pytest.mark.parametrize(("gpu", "dtype"), [(True, {"bfloat16"}), (False, {"float32", "bfloat16"})])
def test_vllm_itself_has_the_context_and_the_dtype_that_the_sampler_chooses(
    gpu: bool, dtype: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = serving._base(str(tiny_qwen3(tmp_path, max_position_embeddings=8192)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    found = bare_vllm.arguments(base)
    assert base.dtype == "auto" and found["dtype"] in dtype
    assert (found["max_model_len"], found["max_lora_rank"]) == (4096, 32)
