"""Router replay through the SDK: its provenance spans reach the trainer, on a stack of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types
from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan

from app.domain import ops
from app.stores.redis.journal import RedisOpLog
from tests.contract.snippets import as_here, blocks, run
from tests.contract.stack import BASE, Stack, running
from tests.models import byte_tokenizer
from tests.parity import architectures
from tests.servers import free_port

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    base = architectures.build("qwen3-moe", folder / "base")
    byte_tokenizer().save_pretrained(base)
    made = Stack(
        folder / "data",
        base,
        free_port(),
        base="router_replay = true",
        trainer='backend = "torch"',
        sampler='backend = "transformers"',
        program="tests.warm_workers",
    )
    with running(made):
        yield made


def test_spans_of_a_sample_bring_its_routes_to_the_trainer(stack: Stack) -> None:
    with stack.client() as service:
        training = service.create_lora_training_client(base_model=BASE, rank=4).result()
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=6, stop=[])
        (sample,) = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences
        datum = datum_of(sample)
        output = training.forward_backward([datum], "cross_entropy").result()
        found = output.loss_fn_outputs[0]["logprobs"].to_numpy()[len(PROMPT) - 1 :]
        np.testing.assert_allclose(found, sample.logprobs, atol=1e-4)
        with stack.redis() as client:
            journal = RedisOpLog(client, stack.settings().engine)
            seqs = (journal.entry(training.model_id, seq) for seq in range(1, 4))
            batches = [ops.decode(entry.payload).batch for entry in seqs if entry and entry.kind == "forward_backward"]
        assert [batch.routes.shapes for batch in batches] == [((10, 2, 2),)]


def test_the_program_of_the_page_runs(stack: Stack, tmp_path: Path) -> None:
    (program,) = [block.text for block in blocks() if (block.page, block.kind) == ("router-replay.md", "python")]
    run([sys.executable, "-c", as_here(program, stack)], stack, tmp_path)


def datum_of(sample: tinker.SampledSequence) -> types.Datum:
    tokens, n = list(sample.tokens), len(PROMPT)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT + tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(PROMPT[1:] + tokens)},
    )
    return datum.with_provenance(
        model_input=[
            PromptProvenanceSpan(sequence_id=sample.sequence_id, length=n),
            SampledProvenanceSpan(sequence_id=sample.sequence_id, length=len(tokens) - 1),
        ],
        loss_fn_inputs=[
            PromptProvenanceSpan(sequence_id=sample.sequence_id, offset=1, length=n - 1),
            SampledProvenanceSpan(sequence_id=sample.sequence_id, length=len(tokens)),
        ],
    )
