"""Failures of adapters and of fully fine-tuned models in vLLM, and settings that it refuses. tests/conformance checks
that models are sampled correctly."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import xgrammar
from transformers import AutoModelForCausalLM, PretrainedConfig

from app.domain.ops import LoraSpec
from app.domain.records import BaseModelInfo
from app.domain.sampling import SampleRequest
from app.errors import ServerOpError, Unavailable, UnservableModel, UserOpError
from app.settings import BaseModelSettings
from tests.models import tiny_qwen3
from tests.parity import architectures
from workers.backends.sampling.base import RequestHandle
from workers.backends.sampling.vllm import backend
from workers.backends.sampling.vllm.backend import VllmSampler
from workers.backends.sampling.vllm.engine import EngineThread
from workers.backends.sampling.vllm.slots import SequenceSlots
from workers.backends.sampling.vllm.weights import VllmAdapters, VllmFullFinetuneModel
from workers.models import full_weights, lora, packed, peft_files


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


class Adapters:
    """Stand-in for vLLM's engine that takes every adapter."""

    def __init__(self) -> None:
        self.added: list[str] = []

    async def add_lora(self, adapter: Any) -> None:
        self.added.append(adapter.lora_name)


@pytest.mark.parametrize(
    ("case", "adapted", "named"),
    [
        ("qwen3", "q_proj k_proj v_proj o_proj lm_head", r"model\.layers\.0\.mlp\.(gate|up|down)_proj,"),
        ("qwen3-moe", "q_proj k_proj v_proj o_proj lm_head", r"model\.layers\.0\.mlp\.experts,"),
        ("qwen3", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj", "lm_head,"),
    ],
)
def test_an_adapter_on_a_module_that_vllm_would_drop_is_refused(
    case: str, adapted: str, named: str, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(architectures.build(case, tmp_path / "base"))
    engine, paths = Adapters(), [path for group in lora.targets(model).values() for path in group]
    taken = {path for path in paths if path.rpartition(".")[2] in adapted.split()}
    adapters = VllmAdapters(cast(EngineThread, Thread(cast(Engine, engine))), taken)
    for name, spec in (("whole", LoraSpec(rank=2)), ("part", LoraSpec(2, train_mlp=False, train_unembed=False))):
        (tmp_path / name).mkdir()
        peft_files.write(lora.new_adapter(model, spec), tmp_path / name, "base", model)
    with pytest.raises(UserOpError, match=rf"{named}.*sampler\.backend = \"transformers\".*train_mlp"):
        adapters.load("whole", tmp_path / "whole")
    adapters.load("part", tmp_path / "part")
    assert (engine.added, adapters.ids()) == (["part"], ["part"])


class Weights:
    """Stand-in for the weights of an engine that refuses all."""

    def __init__(self, error: Exception, *, healthy: bool = True) -> None:
        self.error, self.healthy = error, healthy

    def load(self, weights_id: str, folder: Path) -> None:
        raise self.error


def load(weights: Weights) -> None:
    sampler = VllmSampler(BaseModelSettings(name="m", path="/m"))
    sampler._weights = cast(VllmFullFinetuneModel, weights)
    sampler._engine = cast(EngineThread, SimpleNamespace(alive=True, stalled_s=0.0))
    sampler.load("a", Path("a"))


SHORT = (
    "Call to add_lora method failed: CUDA out of memory. Tried to allocate 20.00 MiB.",
    "Call to add_lora method failed: Worker failed with error 'CUDA error: out of memory', please check the stack",
    "Call to add_lora method failed: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 99 bytes.",
    "Call to add_lora method failed: Cannot allocate memory (os error 12)",
)


@pytest.mark.parametrize("text", SHORT)
def test_memory_that_is_short_while_an_adapter_is_loaded_is_no_fault_of_the_adapter(text: str) -> None:
    """vLLM's process passes on the text of an error alone."""
    with pytest.raises(Unavailable, match="memory"):
        load(Weights(Exception(text)))


def test_an_adapter_that_vllm_refuses_is_at_fault(folder: Path) -> None:
    with pytest.raises(UserOpError, match="rank 64"):
        load(Weights(Exception("Call to add_lora method failed: rank 64 is too large")))


def test_memory_that_was_short_while_weights_were_written_is_a_fault_of_the_engine() -> None:
    """Its process ends. The requests lose an attempt, so that it does not end without limit."""
    with pytest.raises(ServerOpError, match="out of memory"):
        load(Weights(Exception(SHORT[0]), healthy=False))


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


@pytest.mark.parametrize(
    ("kind", "full", "codes"), [("mxfp4", False, True), ("mxfp4", True, False), ("fp8", False, False)]
)
def test_vllm_starts_on_codes_only_where_it_computes_with_their_numbers_and_no_plain_weights_replace_them(
    kind: str, full: bool, codes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_weights, "write_dequantized", lambda _, dtype, folder: None)
    monkeypatch.setattr(backend, "EngineThread", lambda arguments: arguments["model"])
    form = packed.format_of(PretrainedConfig(quantization_config={"quant_method": kind}), "n")
    sampler: Any = VllmSampler(BaseModelSettings(name="n", path="/codes"), full=full)
    assert (sampler._start({"model": "/codes"}, "bfloat16", form) == "/codes") == codes


KILLED = """
from pathlib import Path
from app.settings import BaseModelSettings
from workers.backends.sampling.vllm.backend import VllmSampler
from workers.models import full_weights

def write(settings, dtype: str, folder: Path) -> None:
    (folder / "model.safetensors").write_text("of a killed process")
    print("written", flush=True)
    input()

full_weights.write_dequantized = write
VllmSampler(BaseModelSettings(name="tiny", path="nowhere", dtype="nf4"))._start({}, "bfloat16", None)
"""


def test_the_plain_weights_of_a_sampler_that_was_killed_are_removed_and_those_of_a_live_one_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take the disk of a whole model, and a sampler that is killed at its start may be at every one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    found: list[list[str]] = []

    def write(_: BaseModelSettings, dtype: str, folder: Path) -> None:
        (folder / "model.safetensors").write_text("of this process")
        found.append(sorted(file.read_text() for file in tmp_path.rglob("*.safetensors")))

    def start(arguments: dict[str, Any]) -> None:
        assert (Path(arguments["model"]) / "model.safetensors").read_text() == "of this process"

    monkeypatch.setattr(full_weights, "write_dequantized", write)
    monkeypatch.setattr(backend, "EngineThread", start)
    sampler = VllmSampler(BaseModelSettings(name="tiny", path="nowhere", dtype="nf4"))
    with subprocess.Popen([sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"written\n"
        sampler._start({}, "bfloat16", None)
        process.kill()
    sampler._start({}, "bfloat16", None)
    assert found == [["of a killed process", "of this process"], ["of this process"]]
    assert list(tmp_path.iterdir()) == []


class OneToken:
    """Stand-in for vLLM's engine. It gives each request one token, and scores only to one that skips its cache."""

    def __init__(self, reason: str = "length") -> None:
        self.reason = reason
        self.read_cache: list[bool] = []
        self.prompts: list[list[int]] = []

    async def generate(self, prompt: dict[str, list[int]], params: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.read_cache.append(not params.skip_reading_prefix_cache)
        self.prompts.append(prompt["prompt_token_ids"])
        logprobs = SimpleNamespace(token_ids=[5], logprobs=[-1.0])
        piece = SimpleNamespace(token_ids=[5], logprobs=logprobs, finish_reason=self.reason)
        scores = torch.tensor([-2.0, -3.0]) if params.skip_reading_prefix_cache else None
        yield SimpleNamespace(outputs=[piece], prompt_token_id_logprobs=scores, num_cached_tokens=0)


class Calls:
    """Stand-in for an EngineThread that runs each call at once."""

    alive, stalled_s = True, 0.0

    def __init__(self, engine: OneToken) -> None:
        self.engine = engine

    def generate(self, method: Callable[[Any], Awaitable[None]], *_: Any) -> None:
        async def run() -> None:
            await method(self.engine)

        asyncio.run(run())


def sampling(engine: OneToken, max_context: int = 9) -> VllmSampler:
    pytest.importorskip("vllm")
    sampler = VllmSampler(BaseModelSettings(name="m", path="/m"))
    sampler._engine = cast(EngineThread, Calls(engine))
    sampler._weights = cast(VllmAdapters, SimpleNamespace(base=None, healthy=True))
    sampler._slots, sampler._end_tokens = SequenceSlots(1), frozenset()
    sampler._model_info = BaseModelInfo("m", "arch", 10, max_context, "float32", ())
    return sampler


class Reported:
    """Takes a request's tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.tokens += tokens


SCORED = SampleRequest(np.arange(3, dtype=np.int32), 1, 1, 7, prompt_logprobs=True, prompt_last_n=2)


def test_a_token_is_reported_once_though_the_cache_holds_a_row_that_is_to_be_scored() -> None:
    """The prompt runs again without the cache, and reported tokens cannot be taken back."""
    engine, seen = OneToken(), Reported()
    sampler = sampling(engine)
    outputs = [sampler.sample(None, SCORED), sampler.sample(None, SCORED, RequestHandle(seen))]
    assert engine.read_cache == [True, False, False]
    assert seen.tokens == [5]
    for output in outputs:
        assert output.prompt_logprobs is not None and output.prompt_logprobs[1:].tolist() == [-2.0, -3.0]


def test_the_token_that_vllm_samples_behind_a_full_context_is_nobodys() -> None:
    engine, seen = OneToken(), Reported()
    handle = RequestHandle(seen)
    output = sampling(engine, max_context=3).sample(None, SCORED, handle)
    assert engine.prompts == [[0, 1]], "vLLM refuses a prompt without room for a token"
    assert (len(output.sequences[0].tokens), seen.tokens, handle.sampled_tokens) == (0, [], 0)


def test_a_sample_that_vllm_gave_up_is_no_result() -> None:
    with pytest.raises(ServerOpError, match="gave the sample up"):
        sampling(OneToken("error")).sample(None, SCORED)
