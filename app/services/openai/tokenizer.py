"""Base models' tokenizers and chat templates in the API process, with `tokenizers` and jinja2's sandbox alone, and the
files that they are read from.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.domain.records import TEMPLATE_FOLDER
from app.domain.sampling import CONTEXT_OVERFLOW
from app.errors import BadRequest
from app.services.base_models import BaseModels
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
RENDERED = ("messages", "tools", "documents", "add_generation_prompt")
"""The variables of a template that every conversation has."""
Find = Callable[[str], Path | None]
"""A file of the tokenizer by its name, or None when it has no such file."""

_KEPT = ("name", "tool_call_id")
_IMAGE = {"type": "image"}
"""An image in a message, as chat templates take it."""
_PARSED = "parsed_arguments"
"""The field that OpenAI's client adds to a call beside its `arguments`; templates may write a function as a whole."""
_SHORT_IDS = "length != 9"
"""The rule of Mistral's templates that refuses the ids of OpenAI and Anthropic, which are longer."""


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
        if _SHORT_IDS in self.template(tools):
            messages = [_with_short_ids(message) for message in messages]
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


def compile_template(text: str) -> Template:
    """The compiled template. Raises jinja2.TemplateError when `text` is not a valid template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(text)


def render(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """The text of a conversation, up to the point where the assistant answers. `variables`: special tokens by name, and
    variables of the caller. Raises BadRequest for messages that the template refuses."""
    own = (messages, tools, None, True)
    try:
        return template.render({**variables, **dict(zip(RENDERED, own, strict=True))})
    except (TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError) as error:
        raise BadRequest(f"the model's chat template cannot take these messages: {str(error)[:300]}") from None


def _with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with ids of tool calls of 9 characters. A call and its result get the same one."""
    short = dict(message)
    if "tool_calls" in message:
        short["tool_calls"] = [
            {**call, "id": _short_id(call["id"])} if isinstance(call.get("id"), str) else call
            for call in message["tool_calls"]
        ]
    if "tool_call_id" in message:
        short["tool_call_id"] = _short_id(message["tool_call_id"])
    return short


def _short_id(given: str) -> str:
    return given if len(given) == 9 else hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training. Here only the tag's content is
    rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON text without HTML escapes. jinja2's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages in the templates' form: line breaks join text parts that follow each other, an image is a part
    without its file, and a tool call's arguments become an object. Raises BadRequest for other parts, and names the
    message."""
    return [_message(message, f"messages.{place}") for place, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    kept = {name: message[name] for name in _KEPT if message.get(name) is not None}
    calls = message.get("tool_calls")
    more = {"tool_calls": [_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)]} if calls else {}
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    more |= {"reasoning_content": thoughts} if thoughts else {}
    return {"role": role, "content": _content(message["content"], f"{where}.content"), **kept, **more}


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    """A text, or with images a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a text or a list of parts")
    parts = [_part(part, f"{where}.{place}") for place, part in enumerate(content)]
    if _IMAGE not in parts:
        return _joined(parts)
    joined: list[dict[str, str]] = []
    for is_image, group in groupby(parts, key=_IMAGE.__eq__):
        found = list(group)
        joined += found if is_image else [{"type": "text", "text": _joined(found)}]
    return joined


def _joined(parts: Iterable[Mapping[str, str]]) -> str:
    return "\n".join(part["text"] for part in parts)


def _part(part: Any, where: str) -> dict[str, str]:
    if isinstance(part, dict) and part.get("type") == "image_url":
        return _IMAGE
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise BadRequest(f"{where} is of type {str(kind)[:40]!r}; only text and image_url are supported")
    return {"type": "text", "text": text}


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} must hold a function with a name")
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise BadRequest(f"{where}.function.arguments is not valid JSON") from None
    kept = {name: value for name, value in function.items() if name != _PARSED}
    return {**call, "function": {**kept, "arguments": parsed}}
