"""The SDK compresses its batches where the settings ask for it, and the results do not change.

The stack with external servers asks for it, and all other training tests run against that stack as well.
"""

from __future__ import annotations

import tinker

from tests.contract.data import supervised
from tests.contract.stack import Stack


def test_the_sdk_compresses_batches_where_the_settings_say_so(training: tinker.TrainingClient, stack: Stack) -> None:
    assert training.forward(supervised(), "cross_entropy").result().metrics["loss:sum"] > 0
    compressed = training.holder._client_config.proto_compress_fwdbwd
    assert compressed == stack.settings().api.compress_batches == ("compress" in stack.extra)
