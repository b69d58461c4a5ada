"""Base models' tokenizers in the API process, with `tokenizers` alone, and the files that they are read from."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.domain.records import TEMPLATE_FOLDER
from app.domain.sampling import CONTEXT_OVERFLOW
from app.errors import BadRequest
from app.services.base_models import BaseModels
from app.services.openai.chat_templates import compile_template, fit_call_ids, render
from app.stores.hub_cache import HubCache

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The name of the separate template for requests with tools, if a model has several templates.
_WITH_TOOLS = "tool_use"
_DEFAULT = "default"
_TEMPLATE_FILES = {_DEFAULT: "chat_template.jinja", _WITH_TOOLS: f"{TEMPLATE_FOLDER}/{_WITH_TOOLS}.jinja"}
# The most characters per context token. To encode a mebibyte of text takes half a second and 400 MB, and few texts have
# more than 5 characters per token.
_CHARACTERS = 16
Find = Callable[[str], Path | None]
"""A file of the tokenizer by its name, or None when it has no such file."""


class BaseTokenizer:
    """The tokenizer of one base model; safe to use from any thread."""

    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, str], special: Mapping[str, str]) -> None:
        """`templates`: chat templates by name. `special`: special tokens by their names in templates (eos_token,
        ...)."""
        self.core = tokenizer
        self._texts = templates
        self._templates = {name: compile_template(text) for name, text in templates.items()}
        self._special = special
        self._special_ids = {
            token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }

    def encode(self, text: str, context: int = sys.maxsize) -> np.ndarray:
        """int32 [n], with the special tokens that the model expects around a text. Raises BadRequest for a text far too
        long for a context of `context` tokens, and UnicodeEncodeError for half a surrogate pair."""
        return self._ids(text, context, special=True)

    def encode_rendered(self, text: str, context: int) -> np.ndarray:
        """int32 [n] of a text that holds its special tokens already. Raises the errors of `encode`."""
        return self._ids(text, context, special=False)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, up to the point where the assistant answers. `variables`: further variables of
        the template. Raises BadRequest when the model has no chat template, or when its template refuses the
        messages."""
        template = self._templates.get(self._which(tools))
        if template is None:
            raise BadRequest("this model has no chat template: complete a text with OpenAI's /completions instead")
        messages = fit_call_ids(messages, self.template(tools))
        return render(template, messages, tools or None, {**(variables or {}), **self._special})

    def template(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The text of the chat template that these tools select; empty if there is none."""
        return self._texts.get(self._which(tools), "")

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of complete tokens, without special tokens."""
        return self.core.decode(tokens, skip_special_tokens=True)

    def special_ids(self, texts: Sequence[str]) -> dict[int, str]:
        """Those of `texts` that are special tokens, by their ids."""
        return {self._special_ids[text]: text for text in texts if text in self._special_ids}

    def token(self, token: int) -> str:
        """The text of one token, special or not; half a character is U+FFFD."""
        return self.core.decode([token], skip_special_tokens=False)

    def _ids(self, text: str, context: int, *, special: bool) -> np.ndarray:
        if len(text) > _CHARACTERS * context:
            raise BadRequest(
                f"prompt is too long: {len(text)} characters, more than {_CHARACTERS} for each of the {context} tokens "
                f"of the model's context. {CONTEXT_OVERFLOW}"
            )
        text.encode()  # raises UnicodeEncodeError; the tokenizer itself does not explain invalid Unicode
        # `encode` would block all other threads until it returns.
        (found,) = self.core.encode_batch_fast([text], add_special_tokens=special)
        return np.array(found.ids, np.int32)

    def _which(self, tools: Sequence[Mapping[str, Any]]) -> str:
        return _WITH_TOOLS if tools and _WITH_TOOLS in self._texts else _DEFAULT


class Tokenizers:
    """The tokenizers of the base models served, each read on first use."""

    def __init__(self, bases: BaseModels, cache: HubCache) -> None:
        self._bases, self._cache = bases, cache
        self._read: dict[str, BaseTokenizer] = {}
        self._lock = threading.Lock()

    def of(self, base_model: str) -> BaseTokenizer:
        """The model's tokenizer. Raises BadRequest for a model without a fast tokenizer here, and Unavailable when the
        tokenizer cannot be fetched now."""
        if base_model in self._read:  # no lock here: another model's tokenizer may still be loading
            return self._read[base_model]
        source = self._bases.tokenizer(base_model)
        folder = self._cache.folder(source)  # no lock here either: the Hub may be away
        with self._lock:
            if base_model not in self._read:
                self._read[base_model] = read(folder, source)
            return self._read[base_model]


def read(folder: Path, source: str = "") -> BaseTokenizer:
    """The tokenizer in a folder. `source` names it in messages of errors. Raises BadRequest."""
    from tokenizers import Tokenizer

    find, source = find_in(folder), source or str(folder)
    path = find("tokenizer.json")
    if path is None:
        raise BadRequest(
            f"the tokenizer {source!r} has no tokenizer.json that the API can read, so text calls of this model are "
            "not possible; put its files into a folder that the API can read (setting base_models.tokenizer)"
        )
    try:
        core = Tokenizer.from_file(str(path))
        config = read_json(find, "tokenizer_config.json")
        core.no_truncation()
        core.no_padding()
        return BaseTokenizer(core, _templates(find, config), _special(config))
    except Exception as error:  # tokenizers raises nothing narrower for a damaged file
        raise BadRequest(f"the tokenizer {source!r} cannot be read: {error}") from None


def _templates(find: Find, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Where a template has a file of its own, tokenizer_config.json counts for none, as in
    transformers."""
    found = {name: path.read_text() for name, file in _TEMPLATE_FILES.items() if (path := find(file))}
    given = config.get("chat_template") or {}
    if isinstance(given, list):
        given = {entry["name"]: entry["template"] for entry in given}
    return found or ({_DEFAULT: given} if isinstance(given, str) else given)


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def find_in(folder: Path) -> Find:
    """A function that finds a file of the tokenizer in its folder."""
    return lambda name: folder / name if (folder / name).is_file() else None


def read_json(find: Find, name: str) -> dict[str, Any]:
    """The JSON object in a file; empty when there is no such file."""
    path = find(name)
    found = json.loads(path.read_text()) if path else {}
    return found if isinstance(found, dict) else {}
