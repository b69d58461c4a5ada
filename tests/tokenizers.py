"""Small tokenizers, made without transformers: one token per byte, or one per letter with a token for each byte."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BEGIN, END = "<|im_start|>", "<|im_end|>"
PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = (
    "{%- if tools %}<|im_start|>system\nAnswer with <tool_call> tags to use one of {{ tools | tojson }}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(folder: Path, template: str = WITH_TOOLS, special: Sequence[str] = ()) -> Path:
    """Token i is a byte (of the byte-level alphabet, in order) up to 255; 256 is BEGIN, 257 is END, and `special` are
    the tokens after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in (BEGIN, END, *special)])
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "bos_token": {"content": BEGIN}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def letter_tokenizer() -> Tokenizer:
    """Token i is byte i up to 255, as in Llama 2; 256 is a space, and then follow the letters from a to z."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *string.ascii_lowercase]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core
