"""Calls with images, for base models that read them and for others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as sdk

from app.domain.records import READS_IMAGES, Worker
from app.stores.redis.records import dump, load
from tests import pictures
from tests.unit.app.api.test_sampling import admitted
from tests.unit.app.api.test_sampling import body as sample_body
from tests.unit.app.api.test_training import op_of
from tests.unit.app.conftest import CONTEXT, Api, batch

PNG = pictures.encoded(pictures.picture(24, 16))


@pytest.fixture
def seeing(api: Api) -> Iterator[Api]:
    """An API whose workers say that they read images."""
    say(api, {READS_IMAGES: True})
    yield api
    say(api, {})


def say(api: Api, described: dict[str, Any]) -> None:
    records = api.services.records
    for node, fields in list(records.list(Worker.namespace)):
        records.put(Worker.namespace, node, dump(replace(load(Worker, fields), describe=described)))
    api.services.bases.live()


def with_image(model: str, seq: int, expected: int = 6) -> sdk.ForwardBackwardRequest:
    message = batch(model, seq, target_tokens=np.arange(expected + 3))
    image = message.data[0].model_input.add().image
    image.data, image.format, image.expected_tokens = PNG, "png", expected
    return message


def test_a_batch_with_images_is_journalled_with_their_files(seeing: Api) -> None:
    model = seeing.model()
    answer = seeing.forward_backward(with_image(model, 1))
    assert answer.status_code == 200, answer.json
    found = op_of(seeing, model, 1).batch
    assert (found.tokens.values.tolist(), found.images[0].data) == ([1, 2, 3, *[0] * 6], PNG)


def test_a_base_model_without_images_refuses_them(api: Api) -> None:
    answer = api.forward_backward(with_image(api.model(), 1))
    assert (answer.status_code, "served without images" in answer.json["detail"]) == (400, True)
    chunk = {"type": "image", "format": "png", "data": pictures.text(PNG), "expected_tokens": 6}
    answer = api.post("asample", sample_body(api.sampler(), prompt={"chunks": [{"tokens": [1]}, chunk]}))
    assert (answer.status_code, "served without images" in answer.json["detail"]) == (400, True)


def test_the_tokens_of_images_count_in_the_context(seeing: Api) -> None:
    model = seeing.model()
    answer = seeing.forward_backward(with_image(model, 1, CONTEXT))
    assert (answer.status_code, f"{CONTEXT + 3} tokens" in answer.json["detail"]) == (400, True)
    assert seeing.forward_backward(with_image(model, 2, CONTEXT - 3)).status_code == 200


def test_an_image_at_another_size_is_refused(seeing: Api) -> None:
    message = with_image(seeing.model(), 1)
    message.data[0].model_input[1].image.override_dimensions.width = 9
    answer = seeing.forward_backward(message)
    assert (answer.status_code, "override_dimensions" in answer.json["detail"]) == (400, True)


def test_a_prompt_with_an_image_is_admitted_with_its_file(seeing: Api) -> None:
    sampler = seeing.sampler()
    chunk = {"type": "image", "format": "png", "data": pictures.text(PNG), "expected_tokens": 6}
    answer = seeing.post("asample", sample_body(sampler, prompt={"chunks": [{"tokens": [1]}, chunk]}))
    assert answer.status_code == 200, answer.json
    request = admitted(seeing, f"{sampler}:0")
    assert (request.prompt.tolist(), request.images[0].data) == ([1, *[0] * 6], PNG)
