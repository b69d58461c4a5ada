from __future__ import annotations

import pytest

from app.settings import TrainerSettings
from workers.train.assembly import _merged_tokens


@pytest.mark.parametrize(
    ("device", "micro_batch_tokens", "settings", "merged"),
    [
        ("cuda:0", 32_768, {}, 32_768),
        ("cuda:0", 1024, {}, 8192),
        ("cuda:0", 32_768, {"merged_tokens": 100}, 100),
        ("cpu", 1024, {}, 0),
        ("cpu", 1024, {"exact": False}, 8192),
        ("cuda:0", 32_768, {"exact": True, "merged_tokens": 100}, 0),
    ],
)
def test_ops_of_other_models_may_fill_a_micro_batch_unless_passes_are_exact(
    device: str, micro_batch_tokens: int, settings: dict[str, int], merged: int
) -> None:
    facts = {"devices": [device], "micro_batch_tokens": micro_batch_tokens}
    assert _merged_tokens(TrainerSettings(**settings), facts) == merged
