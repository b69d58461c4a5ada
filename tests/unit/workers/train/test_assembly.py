from __future__ import annotations

import pytest

from app.settings import TrainerSettings
from tests.unit.workers.conftest import Ended, World
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


def test_the_other_ranks_end_with_the_backend_and_that_is_no_failure_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for an orderly end may be over while the backend shuts down."""
    worker = world.worker("a/1")
    monkeypatch.setattr(worker.backend, "healthy", lambda: False)
    with pytest.raises(Ended, match="the backend failed"):
        worker.hand_back()
    asked: list[None] = []
    monkeypatch.setattr(worker.backend, "shutdown", lambda: asked.append(worker.hand_back()))
    worker.close()
    assert asked == [None]
