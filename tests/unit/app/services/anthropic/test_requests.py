"""Messages of Anthropic's requests in the form that chat templates take."""

from __future__ import annotations

from typing import Any

from app.services.anthropic.requests import chat_of
from app.services.openai.chat_templates import for_template


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def use(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"id-{name}", "name": name, "input": {}}


def result(name: str, **content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"id-{name}", "is_error": False, **content}


def translated(*turns: tuple[str, Any], system: Any = None) -> list[dict[str, Any]]:
    messages = [{"role": role, "content": content} for role, content in turns]
    choice = {"type": "auto", "disable_parallel_tool_use": False}
    asked = {"model": "base", "messages": messages, "system": system, "tools": [], "tool_choice": choice}
    asked |= {"thinking": {"type": "disabled"}, "output_config": {"format": None}}
    return for_template(chat_of(asked).messages)


def test_turns_of_one_role_are_one_turn_as_some_templates_want():
    assert translated(("user", "a"), ("user", [text("b"), text("c")]), ("assistant", "d"), ("user", "e")) == [
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]


def test_system_is_the_first_message_and_may_come_again():
    assert translated(("user", "a"), ("system", [text("b")]), ("user", "c"), system=[text("s"), text("t")]) == [
        {"role": "system", "content": "s\nt"},
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c"},
    ]


def test_a_call_is_its_turns_and_each_result_a_message_in_their_order():
    results = [result("f", content="1"), result("g", content=[text("2"), text("3")]), result("h"), text("go on")]
    messages = translated(("user", "a"), ("assistant", [text("see"), use("f"), use("g")]), ("user", results))
    assert messages[1]["content"] == "see"
    assert [(call["id"], call["function"]) for call in messages[1]["tool_calls"]] == [
        (f"id-{name}", {"name": name, "arguments": {}}) for name in "fg"
    ]
    assert messages[2:] == [
        {"role": "tool", "tool_call_id": "id-f", "content": "1"},
        {"role": "tool", "tool_call_id": "id-g", "content": "2\n3"},
        {"role": "tool", "tool_call_id": "id-h", "content": ""},
        {"role": "user", "content": "go on"},
    ]


def test_the_blocks_of_an_answer_come_back_as_the_clients_send_them():
    shown = {"type": "text", "text": "see", "citations": None}
    call = {**use("f"), "caller": {"type": "direct"}, "toolset_name": None}
    messages = translated(("user", "a"), ("assistant", [shown, call]), ("user", [result("f", content="1")]))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
