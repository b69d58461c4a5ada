"""`python -m workers.models.demo_model GGUF TARGET`: writes the bundled GGUF model as a Hugging Face folder.

transformers keeps a GGUF model's quantization_config and then refuses to save it. So the dequantised weights are moved
into a new model of the same config.
"""

from __future__ import annotations

import shutil
import sys
from functools import cache
from pathlib import Path

_DROPPED = ("quantization_config", "dtype")


def convert(source: Path, target: Path) -> None:
    """Writes weights (float32, as dequantised), config, tokenizer and chat template; `target` appears whole."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    # transformers reads the whole file three times, and makes the table of names anew for each module: 25 s.
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(gguf.GGUFReader), cache(gguf.get_tensor_name_map)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = {key: value for key, value in loaded.config.to_dict().items() if key not in _DROPPED and key[0] != "_"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:
        # The user reads the last line: one line, and no traceback.
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
