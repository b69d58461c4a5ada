"""Requests of the Messages API in OpenAI's form, which chat templates take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from app.errors import BadRequest
from app.services.openai.json_schema import checked_schema
from app.services.openai.requests import Chat, Effort, Sampling, is_effort

_FIELDS = {
    "text": {"text", "citations"},
    "image": {"source"},
    "tool_use": {"id", "name", "input", "caller", "toolset_name"},
    "tool_result": {"tool_use_id", "content", "is_error", "toolset_name"},
    "thinking": {"thinking", "signature"},
}
"""The fields of each type of block. Those that do not change the prompt are ignored."""

_IMAGES = ("image/png", "image/jpeg")


class Block(NamedTuple):
    """A block of content, and its place in the request."""

    place: str
    fields: Any

    @property
    def kind(self) -> str:
        return str(self.fields.get("type") if isinstance(self.fields, Mapping) else type(self.fields).__name__)


def chat_of(asked: Mapping[str, Any]) -> Chat:
    """The conversation of a request. Turns of one role that follow each other are one turn, and a last turn of the
    assistant is the beginning of the answer. Raises BadRequest for a block that is not supported, and names it."""
    turns = _turns(asked["messages"])
    prefill = _joined(turns.pop()[1]) if turns[-1][0] == "assistant" else ""
    messages = _system(_blocks(asked["system"], "system")) if asked["system"] else []
    for role, blocks in turns:
        messages += _FORMS[role](blocks)
    choice, output = asked["tool_choice"], asked["output_config"]
    return Chat(
        asked["model"],
        messages,
        tools=[] if choice["type"] == "none" else [_tool(tool) for tool in asked["tools"]],
        parallel=not choice["disable_parallel_tool_use"],
        prefill=prefill,
        variables={"enable_thinking": thinks(asked)},
        effort=_effort(output),
        needs_effort=False,
        is_json=output["format"] is not None,
    )


def _effort(output_config: Mapping[str, Any]) -> Effort | None:
    """The effort that a request asks for. Claude Code always sends one, so an unknown one is left out."""
    effort = output_config.get("effort")
    return effort if is_effort(effort) else None


def thinks(asked: Mapping[str, Any]) -> bool:
    """True if a request asks for the model's thoughts."""
    return bool(asked["thinking"]["type"] != "disabled")


def sampling_of(asked: Mapping[str, Any]) -> Sampling:
    """The sampling parameters of a request. Raises BadRequest."""
    form = asked["output_config"]["format"]
    return Sampling(
        max_tokens=asked["max_tokens"],
        temperature=asked["temperature"],
        top_p=asked["top_p"],
        top_k=asked["top_k"],
        stream=asked["stream"],
        stop=asked["stop_sequences"],
        seed=asked["seed"],
        json_schema=checked_schema(form["schema"], "output_config.format.schema") if form else "",
    )


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Block]]]:
    """(role, blocks) of each turn."""
    found = [
        (message["role"], block)
        for place, message in enumerate(messages)
        for block in _blocks(message["content"], f"messages.{place}.content")
    ]
    return [(role, [block for _, block in turn]) for role, turn in groupby(found, key=itemgetter(0))]


def _blocks(content: Any, place: str) -> list[Block]:
    if isinstance(content, str):
        return [Block(place, {"type": "text", "text": content})]
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{place} must be a text or a list of at least one block")
    return [_known(Block(f"{place}.{index}", fields)) for index, fields in enumerate(content)]


def _known(block: Block) -> Block:
    """The block. Raises BadRequest for a field that its type does not have. A block of another type is refused where it
    is used."""
    if block.kind in _FIELDS:
        given = {name for name, value in block.fields.items() if value is not None}
        if unknown := given - _FIELDS[block.kind] - {"type", "cache_control"}:
            raise BadRequest(f"{block.place}.{min(unknown)[:40]}: a block of type {block.kind} has no such field")
    return block


def _system(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    return [_plain("system", blocks)]


def _user(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Each tool result is a message of its own."""
    messages: list[dict[str, Any]] = []
    for is_result, found in groupby(blocks, key=lambda block: block.kind == "tool_result"):
        part = list(found)
        messages += [_result(block) for block in part] if is_result else [{"role": "user", "content": _content(part)}]
    return messages


def _assistant(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    message = _plain("assistant", (block for block in blocks if block.kind not in ("tool_use", "thinking")))
    if calls := [_call(block) for block in blocks if block.kind == "tool_use"]:
        message["tool_calls"] = calls
    if thoughts := [_field(block, "thinking", str) for block in blocks if block.kind == "thinking"]:
        message["reasoning_content"] = "\n".join(thoughts)
    return [message]


_FORMS = {"system": _system, "user": _user, "assistant": _assistant}


def _plain(role: str, blocks: Iterable[Block]) -> dict[str, Any]:
    return {"role": role, "content": _joined(blocks)}


def _content(blocks: Sequence[Block]) -> str | list[dict[str, Any]]:
    """A text, or with images a list of parts."""
    if not any(block.kind == "image" for block in blocks):
        return _joined(blocks)
    return [_image(block) if block.kind == "image" else {"type": "text", "text": _text(block)} for block in blocks]


def _image(block: Block) -> dict[str, Any]:
    """A part with a data: URL."""
    source = Block(f"{block.place}.source", _field(block, "source", dict))
    if source.kind != "base64":
        raise BadRequest(
            f"{source.place} is of type {source.kind[:40]!r}; it must be base64, because this server fetches nothing"
        )
    media_type, data = _field(source, "media_type", str), _field(source, "data", str)
    if media_type not in _IMAGES:
        raise BadRequest(f"{source.place}.media_type is {media_type[:40]!r}; it can be {' or '.join(_IMAGES)}")
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}


def _joined(blocks: Iterable[Block]) -> str:
    return "\n".join(_text(block) for block in blocks)


def _text(block: Block) -> str:
    if block.kind != "text":
        raise BadRequest(
            f"{block.place} is of type {block.kind[:40]!r}; only text is supported here (and tool_use and thinking "
            "in turns of the assistant before the last one, image and tool_result in turns of the user)"
        )
    text: str = _field(block, "text", str)
    return text


def _call(block: Block) -> dict[str, Any]:
    function = {"name": _field(block, "name", str), "arguments": _field(block, "input", dict)}
    return {"id": _field(block, "id", str), "type": "function", "function": function}


def _result(block: Block) -> dict[str, Any]:
    content = block.fields.get("content") or ""
    found = _content(_blocks(content, f"{block.place}.content"))
    return {"role": "tool", "tool_call_id": _field(block, "tool_use_id", str), "content": found}


def _field(block: Block, name: str, kind: type) -> Any:
    value = block.fields.get(name)
    if not isinstance(value, kind):
        raise BadRequest(f"{block.place}.{name} must be {'an object' if kind is dict else 'a string'}")
    return value


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = {"description": tool["description"]} if tool["description"] else {}
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": tool["input_schema"]}}
