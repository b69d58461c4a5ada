"""Reading of a tokenizer's files, and the errors for unreadable ones."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from app.errors import BadRequest, Unavailable
from app.services.base_models import BaseModels
from app.services.openai.chat_templates import _SHORT_IDS
from app.services.openai.tokenizer import BaseTokenizer, Tokenizers, read
from app.stores.hub_cache import HubCache
from tests.hub_of_models import hub_of_models, use_hub
from tests.tokenizers import PLAIN, WITH_TOOLS, byte_tokenizer

CONTEXT = 1000
ASK = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


class Sources(dict[str, str]):
    """The sources of the base models' tokenizers."""

    tokenizer = dict.__getitem__


def tokens_of(tokenizer: BaseTokenizer) -> list[int]:
    """The tokens of the chat, as a call makes them."""
    return tokenizer.encode_rendered(tokenizer.chat_text(ASK, []), CONTEXT).tolist()


def test_a_template_in_a_file_of_its_own_is_taken(tmp_path: Path):
    byte_tokenizer(tmp_path, "{{ raise_exception('the old one') }}")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer = read(tmp_path)
    assert tokenizer.core.decode(tokens_of(tokenizer), skip_special_tokens=False) == "<|im_start|>hi"


def test_of_several_templates_the_one_for_tools_is_taken_with_tools(tmp_path: Path):
    byte_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    tokenizer = read(tmp_path)
    assert [tokenizer.chat_text(ASK, tools) for tools in ([], [TOOL])] == [
        "plain",
        "tools",
    ]


def test_ids_of_calls_fit_the_template_that_is_taken(tmp_path: Path):
    byte_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    ids = "{{ messages[0].tool_calls[0].id }}"
    named = [{"name": "default", "template": ids}, {"name": "tool_use", "template": f"{ids}{{# {_SHORT_IDS} #}}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    tokenizer = read(tmp_path)
    messages = [{"role": "assistant", "content": "", "tool_calls": [{"id": "call_0123456789"}]}]
    assert tokenizer.chat_text(messages, []) == "call_0123456789"
    assert len(tokenizer.chat_text(messages, [TOOL])) == 9


NAMED = [{"name": "default", "template": "old plain"}, {"name": "tool_use", "template": "old tools"}]
FILES = {"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": "tools"}


@pytest.mark.parametrize("names", [[*FILES], [*FILES][:1]], ids=["both", "default"])
@pytest.mark.parametrize("named", [NAMED, "old plain"], ids=["several", "one"])
def test_templates_in_files_stand_for_all_of_the_configuration(tmp_path: Path, names: list[str], named: object):
    byte_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    (tmp_path / "additional_chat_templates").mkdir()
    for name in names:
        (tmp_path / name).write_text(FILES[name])
    tokenizer = read(tmp_path)
    assert [tokenizer.chat_text(ASK, tools) for tools in ([], [TOOL])] == ["plain", FILES[names[-1]]]


@pytest.mark.parametrize("template", [WITH_TOOLS, PLAIN])
def test_text_that_looks_special_is_tokenized_once(tmp_path: Path, template: str):
    tokenizer = read(byte_tokenizer(tmp_path, template))
    assert [token for token in tokens_of(tokenizer) if token > 255] == [256, 257, 256]


def test_what_a_template_refuses_is_the_clients_to_read(tmp_path: Path):
    tokenizer = read(byte_tokenizer(tmp_path, "{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(BadRequest, match="roles must alternate"):
        tokenizer.chat_text(ASK, [])


FAILING = ["{{ messages[0].content.index('?') }}", "{{ 1 // 0 }}", "{{ messages[0].content[0].x.y }}"]


@pytest.mark.parametrize("template", FAILING)
def test_what_a_template_fails_of_is_the_clients_to_read(tmp_path: Path, template: str):
    tokenizer = read(byte_tokenizer(tmp_path, template))
    with pytest.raises(BadRequest, match="cannot take these messages"):
        tokenizer.chat_text(ASK, [])


HOSTILE = ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"]


@pytest.mark.parametrize("template", HOSTILE)
def test_a_template_reaches_nothing_but_what_it_is_given(tmp_path: Path, template: str):
    tokenizer = read(byte_tokenizer(tmp_path, template))
    with pytest.raises(BadRequest, match=r"unsafe|immutable|undefined"):
        tokenizer.chat_text(ASK, [])


def test_a_base_without_a_template_says_what_can_be_used(tmp_path: Path):
    byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(BadRequest, match="/completions"):
        read(tmp_path).chat_text(ASK, [])


def test_a_long_text_keeps_no_other_thread_from_running(tmp_path: Path):
    tokenizer, ticks, over = read(byte_tokenizer(tmp_path)), 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.001):
            ticks += 1

    def encoded() -> int:
        """Encodes, and returns the number of runs of the other thread meanwhile."""
        before = ticks
        assert len(tokenizer.encode("a b " * 2**17)) == 2**19
        return ticks - before

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        # On a machine that stood still, the other thread had no processor, once or twice.
        assert any(encoded() >= 8 for _ in range(20))
    finally:
        over.set()
        thread.join()


def test_a_text_that_no_context_holds_is_not_tokenized(tmp_path: Path):
    tokenizer = read(byte_tokenizer(tmp_path))
    assert len(tokenizer.encode("a" * 160, 10)) == 160
    for text in ("a" * 161, "\ud800" * 10**6):
        with pytest.raises(
            BadRequest, match=f"prompt is too long: {len(text)} characters, more than 16 for each of the 10 tokens"
        ):
            tokenizer.encode(text, 10)


def test_a_tokenizer_that_is_being_fetched_delays_no_other(tmp_path: Path):
    asked, over, read_one = threading.Event(), threading.Event(), threading.Event()

    class Cache(HubCache):
        def folder(self, source: str) -> Path:
            if source == "slow":
                asked.set()
                over.wait(600)
            return tmp_path

    byte_tokenizer(tmp_path)
    tokenizers = Tokenizers(cast(BaseModels, Sources(slow="slow", other="other")), Cache())
    slow = threading.Thread(target=tokenizers.of, args=("slow",))
    other = threading.Thread(target=lambda: tokenizers.of("other") and read_one.set(), daemon=True)
    slow.start()
    assert asked.wait(60)
    other.start()
    was_read = read_one.wait(60)
    over.set()
    slow.join()
    assert was_read


def test_a_hub_that_is_silent_delays_no_tokenizer_on_this_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = byte_tokenizer(tmp_path / "local")
    monkeypatch.setattr("app.stores.hub_cache._ANSWER_S", 60)
    tokenizers = Tokenizers(cast(BaseModels, Sources(hub="org/model", local=str(folder))), HubCache())
    failures: list[str] = []

    def ask() -> None:
        try:
            tokenizers.of("hub")
        except Unavailable as error:
            failures.append(str(error).partition(": ")[0])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    with hub_of_models() as hub:
        hub.awake.clear()
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        for thread in threads:
            thread.start()
        while not hub.asked:
            time.sleep(0.01)
        assert tokenizers.of("local").encode("hi").tolist()
        assert failures == []
        hub.awake.set()
        for thread in threads:
            thread.join(60)
    assert failures == ["the tokenizer of org/model from 127.0.0.1 cannot be fetched"] * 2


@pytest.mark.parametrize("source", ["/no/such/folder", ""])
def test_a_tokenizer_that_cannot_be_read_is_named_with_the_remedy(source: str, tmp_path: Path):
    with pytest.raises(BadRequest, match=rf"{source or tmp_path}.*tokenizer\.json.*base_models\.tokenizer"):
        read(Path(source or tmp_path))


def test_a_folder_of_the_cache_is_named_by_its_hub_id(tmp_path: Path):
    with pytest.raises(BadRequest, match=r"'org/model' has no tokenizer\.json"):
        read(tmp_path, "org/model")


def test_a_damaged_tokenizer_is_named(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadRequest, match="cannot be read"):
        read(tmp_path)
