"""Failures of fully fine-tuned models in vLLM, and settings that it refuses. tests/conformance checks that models are
sampled correctly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import xgrammar
from transformers import AutoModelForCausalLM

from app.errors import ServerOpError, UnservableModel
from app.settings import BaseModelSettings
from tests.models import tiny_qwen3
from workers.backends.sampling.vllm.backend import VllmFullFinetuneModel, VllmSampler
from workers.backends.sampling.vllm.engine import EngineThread


class Engine:
    """Stand-in for vLLM's engine that receives new weights; it fails on request."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = False

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode} {clear_cache}")

    async def collective_rpc(self, method: str, args: tuple[str]) -> None:
        self.calls.append(method)
        if self.fails:
            raise RuntimeError("a worker died")

    async def resume_generation(self) -> None:
        self.calls.append("resume")


class Thread:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def call(self, method: Callable[[Any], Awaitable[None]]) -> None:
        async def run() -> None:
            await method(self.engine)

        asyncio.run(run())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_qwen3(tmp_path)


def test_weights_are_written_while_nothing_runs_and_its_cache_is_forgotten(folder: Path) -> None:
    engine = Engine()
    whole = VllmFullFinetuneModel(cast(EngineThread, Thread(engine)), AutoModelForCausalLM.from_pretrained(folder))
    for _ in range(2):
        whole.load("one", folder)
    assert engine.calls == ["pause wait True", "replace_weights", "resume"]
    assert (whole.ids(), whole.healthy) == (["one"], True)


def test_weights_that_may_be_written_in_part_are_nobodys_and_the_engine_is_of_no_further_use(folder: Path) -> None:
    engine = Engine()
    whole = VllmFullFinetuneModel(cast(EngineThread, Thread(engine)), AutoModelForCausalLM.from_pretrained(folder))
    whole.load("one", folder)
    engine.fails = True
    with pytest.raises(RuntimeError, match="a worker died"):
        whole.load("two", folder)
    assert not whole.healthy
    for name in ("one", "two"):
        with pytest.raises(ServerOpError, match="not loaded"):
            whole.find(name)


def test_router_replay_is_refused_in_one_line_before_the_engine_starts() -> None:
    sampler = VllmSampler(BaseModelSettings(name="tiny", path="nowhere", router_replay=True))
    with pytest.raises(UnservableModel) as caught:
        sampler.open()
    assert str(caught.value) == (
        "base model 'tiny': the vLLM sampler records no experts, so router_replay cannot be on; turn it off, or set "
        'sampler.backend to "transformers"'
    )


def test_an_error_of_a_schema_names_no_source_file():
    with pytest.raises(RuntimeError) as native:
        xgrammar.Grammar.from_json_schema('{"type": "array", "minItems": 1}')
    assert ".cc" in str(native.value)
    text = str(VllmSampler(BaseModelSettings(name="m", path="/m"))._op_error(native.value, "sampling", by_user=False))
    assert ("minItems" in text, ".cc" in text) == (True, False)
