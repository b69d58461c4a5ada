"""Samples that follow a JSON schema, from the sampler that can make them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from jsonschema import validate

from app.errors import UserOpError
from tests.conformance.samplers import PROMPTS, ask, one, tokens_of
from tests.models import byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "town": {"$ref": "#/$defs/town"},
        "days": {"type": "array", "items": {"enum": ["dry", "wet"]}, "minItems": 1, "maxItems": 2},
        "degrees": {"type": "integer", "minimum": -40, "maximum": 50},
    },
    "required": ["town", "days", "degrees"],
    "additionalProperties": False,
    "$defs": {"town": {"enum": ["Ulm", "Jena", "Köln"]}},
}


@pytest.mark.parametrize("sampler", ["vllm"], indirect=True)
@pytest.mark.parametrize("adapter", [None, "one"])
def test_a_sample_follows_its_schema_and_its_seed(sampler, reference, adapter):
    asked = ask(PROMPTS[0], json_schema=json.dumps(SCHEMA), max_tokens=200, num_samples=4, ignore_eos=False)
    found = sampler.sample(adapter, asked)
    for sequence in found.sequences:
        validate(json.loads(byte_tokenizer().decode(sequence.tokens, skip_special_tokens=True)), SCHEMA)
        assert sequence.stopped
        scores = reference.logprobs(adapter, np.concatenate([PROMPTS[0], sequence.tokens]))
        np.testing.assert_allclose(sequence.logprobs, scores[-len(sequence.tokens) :], atol=1e-3)
    assert len({tuple(tokens) for tokens in tokens_of(found)}) > 1
    free = one(sampler, adapter, PROMPTS[1], seed=5)
    assert tokens_of(sampler.sample(adapter, asked)) == tokens_of(found)
    assert one(sampler, adapter, PROMPTS[1], seed=5).tokens.tolist() == free.tokens.tolist()


@pytest.mark.parametrize("sampler", ["vllm"], indirect=True)
def test_a_schema_without_a_grammar_is_the_clients_error_and_the_sampler_goes_on(sampler):
    for schema in ({"type": "strange"}, {"type": "object", "properties": {"a": False}, "required": ["a"]}):
        with pytest.raises(UserOpError, match="json schema") as refused:
            sampler.sample(None, ask(PROMPTS[0], json_schema=json.dumps(schema)))
        assert ".cc" not in str(refused.value)
    assert sampler.healthy()
    assert len(one(sampler, None, PROMPTS[0]).tokens) == 12


@pytest.mark.parametrize("sampler", ["transformers"], indirect=True)
def test_a_sampler_that_cannot_follow_a_schema_refuses_it(sampler):
    with pytest.raises(UserOpError, match="cannot follow a JSON schema"):
        sampler.sample(None, ask(PROMPTS[0], json_schema=json.dumps(SCHEMA)))
