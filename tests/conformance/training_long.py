"""`python -m tests.conformance.training_long CASE FOLDER VOCABULARY`: trains one datum of 32,768 tokens.

Prints the bytes that the pass needed beyond the process's memory before it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from app.domain.ops import ForwardBackward, LoraSpec
from app.domain.results import ForwardBackwardOutput
from app.settings import BaseModelSettings
from tests.parity.datums import batch, supervised
from workers.backends.training import backends
from workers.backends.training.base import Create

LENGTH = 32_768
_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
}
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "window": ("Mistral", {"sliding_window": 64}),
    "hybrid": ("Qwen3_5Text", _DELTA_NET),
}


def build(case: str, folder: Path, vocabulary: int) -> Path:
    name, fields = CASES[case]
    config = getattr(transformers, f"{name}Config")(**{**_SHAPE, **fields}, vocab_size=vocabulary)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, or VmHWM at most since the last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main(case: str, folder: str, vocabulary: str) -> None:
    torch.set_num_threads(1)
    base = build(case, Path(folder), int(vocabulary))
    trainer = {"backend": "torch"}
    backend = backends.create(BaseModelSettings(name="long", path=str(base), dtype="float32", trainer=trainer))
    backend.open()
    backend.apply({"m": Create(LoraSpec(rank=4, seed=1))})
    backend.apply({"m": ForwardBackward(batch(supervised(1, (64,))), "cross_entropy")})
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    output = backend.apply({"m": ForwardBackward(batch(supervised(2, (LENGTH,))), "cross_entropy")})["m"]
    assert isinstance(output, ForwardBackwardOutput), output
    assert all(gradient.any() for name, gradient in backend.gradients("m").items() if "lora_B" in name)
    print(memory("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
