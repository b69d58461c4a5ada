"""Chats with images, of OpenAI's and of Anthropic's clients."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from werkzeug.test import TestResponse

from app.domain.images import Image
from app.domain.records import READS_IMAGES
from tests import pictures
from tests.unit.app.api.chat.anthropic.caller import Anthropic
from tests.unit.app.api.chat.openai.caller import OpenAi
from tests.unit.app.api.chat.standin import CONTEXT, Standin
from tests.unit.app.conftest import Api, add_worker

START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
PAD_ID = 259
PNG = pictures.encoded(pictures.picture(24, 16))  # 3 x 2 tokens
JPEG = pictures.encoded(pictures.picture(16, 16), "jpeg")  # 2 x 2 tokens
WIDE = pictures.encoded(pictures.picture(201, 1))


@pytest.fixture(scope="module")
def template() -> str:
    """A template in the form of Qwen3-VL's. It leaves the images of tools out."""
    return (
        "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
        f"{{% elif message.role != 'tool' %}}{START}{PAD}{END}{{% endif %}}{{% endfor %}}{{% endif %}}{{% endfor %}}"
        "{% if opens %}<think>{% else %}{# </think> #}{% endif %}"
    )


@pytest.fixture(scope="module")
def special() -> Sequence[str]:
    return (START, PAD, END)


@pytest.fixture
def seeing(served: tuple[Api, Standin]) -> Iterator[tuple[Api, Standin]]:
    """An API with a sampler that reads images, of the size of the tiny models of tests/pictures.py."""
    services = served[0].services
    folder = Path(services.settings.base_models[0].path)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "image_token_id": PAD_ID}))
    pictures.processor().save_pretrained(folder)
    add_worker(services, "sampler", CONTEXT, **{READS_IMAGES: True})
    services.bases.live()
    yield served
    services.openai._image_tokens_of._read.clear()


@pytest.fixture
def openai(seeing: tuple[Api, Standin]) -> OpenAi:
    seeing[1].says("yes")
    return OpenAi(*seeing)


@pytest.fixture
def anthropic(seeing: tuple[Api, Standin]) -> Anthropic:
    seeing[1].says("yes")
    return Anthropic(*seeing)


def part(data: bytes, form: str = "png", **fields: Any) -> dict[str, Any]:
    """An image as OpenAI's clients send it."""
    url = f"data:image/{form};base64,{pictures.text(data)}"
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def block(data: bytes, form: str = "png") -> dict[str, Any]:
    """An image as Anthropic's clients send it."""
    source = {"type": "base64", "media_type": f"image/{form}", "data": pictures.text(data)}
    return {"type": "image", "source": source}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def check_seen(standin: Standin) -> int:
    """The prompt "a", PNG, "b\\nc", JPEG reached the sampler; returns its length."""
    (request,) = standin.seen
    encoded = standin.tokenizer.encode
    before = encoded(f"[user]a{START}").tolist()
    between = encoded(f"{END}b\nc{START}").tolist()
    assert request.prompt.tolist() == [*before, *[0] * 6, *between, *[0] * 4, *encoded(END).tolist()]
    second = len(before) + 6 + len(between)
    assert request.images == (Image(0, len(before), 6, "png", PNG), Image(0, second, 4, "jpeg", JPEG))
    return len(request.prompt)


def test_images_of_openais_clients_reach_the_sampler_at_their_places(openai: OpenAi):
    answer = openai.chat(messages=user(text("a"), part(PNG), text("b"), text("c"), part(JPEG, "jpeg", detail="auto")))
    assert answer["choices"][0]["message"]["content"] == "yes"
    assert answer["usage"]["prompt_tokens"] == check_seen(openai.standin)


def test_thoughts_that_the_prompt_begins_are_no_part_of_an_answer_about_an_image(openai: OpenAi):
    openai.standin.says("hm</think>yes")
    (choice,) = openai.chat(messages=user(part(PNG)), chat_template_kwargs={"opens": True})["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", "yes")


def test_images_of_anthropics_clients_do_too_and_are_counted(anthropic: Anthropic):
    messages = user(text("a"), block(PNG), text("b"), text("c"), block(JPEG, "jpeg"))
    answer = anthropic.message(messages=messages)
    assert answer["content"] == [{"type": "text", "text": "yes"}]
    counted = anthropic.post("messages/count_tokens", messages=messages)
    assert counted.json == {"input_tokens": check_seen(anthropic.standin)}
    assert answer["usage"]["input_tokens"] == counted.json["input_tokens"]


def test_a_stream_answers_an_image(openai: OpenAi):
    with openai.post("chat/completions", messages=user(part(PNG)), stream=True) as answer:
        assert "yes" in answer.text
    assert [image.data for image in openai.standin.seen[0].images] == [PNG]


def refused(answer: TestResponse, api: Api) -> str:
    assert answer.status_code == 400, answer.text
    assert api.services.oplog.pending() == []
    return str(answer.json["error"]["message"])


OPENAI_BAD: dict[str, tuple[Any, str]] = {
    "a web address": ({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, "fetches nothing"),
    "a file": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "fetches nothing"),
    "another format": (part(PNG, "webp"), "image 2: the URL begins with 'data:image/webp;base64'"),
    "another file than said": (part(JPEG), "image 2 is not a png file"),
    "no base64": (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}},
        "image 2 is not valid base64",
    ),
    "no object": ({"type": "image_url", "image_url": "data:"}, "image_url must be an object"),
    "less detail": (part(PNG, detail="low"), "image_url.detail"),
    "too many pixels": (part(pictures.stated(2**13, 2**13)), "pixels"),
    "too wide": (part(WIDE), "image 2 has 201 x 1 pixels; the model takes no image with a side over 200 times"),
    "a placeholder in a text": (text(PAD), "the messages hold 1 images, but the prompt has 2 placeholders"),
    "a long image beyond the context": ([part(pictures.encoded(pictures.picture(64, 64)))] * 8, f"> {CONTEXT - 1} max"),
}


@pytest.mark.parametrize("case", OPENAI_BAD)
def test_an_image_that_cannot_be_read_is_a_400_by_name(openai: OpenAi, case: str):
    bad, named = OPENAI_BAD[case]
    messages = user(part(PNG), *(bad if isinstance(bad, list) else [bad]))
    assert named in refused(openai.post("chat/completions", messages=messages), openai.api)


def source(**fields: Any) -> dict[str, Any]:
    return {"type": "image", "source": fields}


ANTHROPIC_BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a web address": (
        source(type="url", url="https://a.example"),
        "content.1.source is of type 'url'; it must be base64",
    ),
    "an upload": (source(type="file", file_id="file_1"), "content.1.source is of type 'file'"),
    "another format": (block(PNG, "gif"), "source.media_type is 'image/gif'"),
    "no data": (source(type="base64", media_type="image/png"), "source.data must be a string"),
    "no source": ({"type": "image"}, "content.1.source must be an object"),
    "less detail": ({**block(PNG), "detail": "low"}, "content.1.detail: a block of type image has no"),
    "an image that the template leaves out": (
        {"type": "tool_result", "tool_use_id": "a", "content": [block(PNG)]},
        "the messages hold 1 images, but the prompt has 0 placeholders",
    ),
}


@pytest.mark.parametrize("case", ANTHROPIC_BAD)
def test_a_block_that_cannot_be_read_is_a_400_by_name(anthropic: Anthropic, case: str):
    bad, named = ANTHROPIC_BAD[case]
    assert named in refused(anthropic.post(messages=user(text("a"), bad)), anthropic.api)


@pytest.mark.parametrize("path", ["messages", "messages/count_tokens"])
def test_a_sampler_without_images_refuses_them(anthropic: Anthropic, path: str):
    add_worker(anthropic.api.services, "sampler", CONTEXT)
    anthropic.api.services.bases.live()
    assert "served without images" in refused(anthropic.post(path, messages=user(block(PNG))), anthropic.api)


@pytest.mark.parametrize(
    ("more", "processor"),
    [({"image_token_id": PAD_ID}, "Gemma3ImageProcessor"), ({}, "Qwen2VLImageProcessor")],
    ids=["another processor", "no placeholder"],
)
def test_a_family_with_images_of_another_kind_is_named(openai: OpenAi, more: dict[str, int], processor: str):
    folder = Path(openai.api.services.settings.base_models[0].path)
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", **more}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": processor}))
    message = refused(openai.post("chat/completions", messages=user(part(PNG))), openai.api)
    assert "family 'gemma3'" in message and "image chunks" in message
