"""The SDK compresses its batches where the settings say so, which changes nothing of what comes of them.

The stack whose servers are outside says so, and all other tests of training run against it as well.
"""

from __future__ import annotations

import tinker

from tests.contract.data import supervised
from tests.contract.stack import Stack


def test_the_sdk_compresses_batches_where_it_is_told_to(training: tinker.TrainingClient, stack: Stack) -> None:
    assert training.forward(supervised(), "cross_entropy").result().metrics["loss:sum"] > 0
    told = training.holder._client_config.proto_compress_fwdbwd
    assert told == stack.settings().api.compress_batches == ("compress" in stack.extra)
