"""Fused kernels, which a GPU runs, under Triton's interpreter: they compute what transformers computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

DENSE = (
    *("llama", "mistral, window", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "granite", "olmo2", "olmo3", "phi3"),
    *("smollm3", "qwen3.5", "qwen3.5, vision", "qwen3-vl", "gemma4"),
)
EXPERTS = (
    *("qwen3-moe", "qwen3-next", "deepseek-v3", "mixtral", "llama4", "gpt-oss"),
    *("qwen3-vl-moe", "qwen3.5-moe", "qwen3.5-moe, vision"),
)
# The activation of their gates is none that liger-kernel has.
OTHER_GATES = ("llama: gelu", "qwen3: gelu_pytorch_tanh")
UNKNOWN = ("cohere",)
ALL = DENSE + EXPERTS + OTHER_GATES
_NORM = {"_rms_norm_forward_kernel", "_rms_norm_backward_kernel"}
_SWIGLU = {"_swiglu_forward_kernel", "_swiglu_backward_kernel"}
_GEGLU = {"_geglu_tanh_forward_kernel", "_geglu_tanh_backward_kernel"}
_ROPE = {"_triton_rope"}
_WITHOUT_ROPE = ("qwen3.5", "gemma4", "deepseek-v3", "llama4")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.parity.fused", *ALL, *UNKNOWN]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", ALL)
def test_hidden_states_and_their_gradients_are_those_of_transformers(measured: dict[str, Any], case: str) -> None:
    assert measured[case]["fused"]
    assert max(measured[case]["errors"]) < 1e-5


@pytest.mark.parametrize("case", ALL)
def test_norms_are_fused_and_where_there_are_kernels_gates_and_rotary_embeddings_too(
    measured: dict[str, Any], case: str
) -> None:
    gates = set() if case not in DENSE or case == "qwen3-vl" else _GEGLU if "gemma" in case else _SWIGLU
    rope = set() if case.startswith(_WITHOUT_ROPE) else _ROPE
    assert measured[case]["kernels"].keys() == _NORM | gates | rope


@pytest.mark.parametrize("case", ALL)
def test_another_model_of_the_process_stays_as_it_is(measured: dict[str, Any], case: str) -> None:
    """On a CPU, where the tests' references are too."""
    assert measured[case]["another has the same bits"]
    assert not measured[case]["kernels of another"]


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_architecture_without_fused_kernels_is_left_alone(measured: dict[str, Any], case: str) -> None:
    assert not measured[case]["fused"]
    assert measured[case]["errors"] == [0, 0]
    assert not measured[case]["kernels"]
