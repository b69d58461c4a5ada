"""The cookbook's VLM classifier with its default options trains and is evaluated on local pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.stack import API_KEY, running
from tests.recipes import vlm_classifier
from tests.recipes.programs import metrics
from tests.recipes.run import run


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = vlm_classifier.lay_out(tmp_path_factory.mktemp("vlm"))
    with running(vlm_classifier.serving(folder / "tiny")) as stack:
        code = run("vlm_classifier", stack.url, API_KEY, [], folder)
    assert code == 0, (folder / "output").read_text()[-5000:]
    (found,) = (folder / "log").rglob("metrics.jsonl")
    return found.parent


def test_the_classifier_learns_from_pictures(log: Path):
    losses = metrics(log, "train_mean_nll")
    assert len(losses) == vlm_classifier.STEPS
    assert losses[-1] < losses[0]


def test_it_is_evaluated_on_pictures_that_it_was_not_trained_on(log: Path):
    (loss,) = metrics(log, "test/nll")
    assert loss == pytest.approx(metrics(log, "train_mean_nll")[0], rel=0.05), "before the first step"
    assert metrics(log, "accuracy") == [0.0], "a random model names no colour"
