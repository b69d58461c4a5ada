"""A base model whose path names other weights than before is refused; with the earlier ones back its runs go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.contract.data import logprobs, supervised, train
from tests.contract.stack import BASE, Stack, running
from tests.contract.test_restart import undisturbed
from tests.models import tiny_qwen3
from tests.servers import free_port


def test_a_stack_on_other_weights_ends_and_leaves_the_runs_as_they_were(
    base_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    stack = Stack(
        tmp_path / "data",
        base_path,
        free_port(),
        'backend = "torch"',
        'backend = "transformers"',
        program="tests.warm_workers",
    )
    with running(stack), stack.client() as service:
        expected = undisturbed(service, 4)
        client = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
        train(client, 2)
        assert stack.stop() == 0
        stack.base_path = tiny_qwen3(tmp_path / "other", seed=9)
        with pytest.raises(RuntimeError, match=f"trainer-0: base model '{BASE}' was served here with other weights"):
            stack.start()
        stack.base_path = base_path
        stack.start()
        train(client, 2)
        assert np.array_equal(logprobs(client.forward(supervised(seed=8), "cross_entropy").result()), expected)
