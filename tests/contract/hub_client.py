"""Program of a remote client: loads the tokenizers and prints their encodings of a text and a chat as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.confined import confine

TEXT = "The village tinsmith mends every pot."
CHAT = [{"role": "user", "content": TEXT}]


def tokens(tokenizer: Any) -> dict[str, Any]:
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    return {"text": tokenizer.encode(TEXT), "chat": tokenizer.encode(chat), "eos": tokenizer.eos_token_id}


def main(url: str, key: str, base: str) -> None:
    import tinker
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        training = service.create_lora_training_client(base).result()
        sampling = service.create_sampling_client(base_model=base).result()
        found = [training.get_tokenizer(), sampling.get_tokenizer(), get_tokenizer(base)]
    print(json.dumps([tokens(tokenizer) for tokenizer in found]))


if __name__ == "__main__":
    confine()
    main(*sys.argv[1:])
