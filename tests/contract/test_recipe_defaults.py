"""tinker-cookbook's programs with their default options: each trains, or is refused before it samples."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.contract.stack import API_KEY, running
from tests.recipes.data import lay_out
from tests.recipes.defaults import METRICS, REFUSED, STEPS, Ended, ended, logged
from tests.recipes.models import serving
from tests.recipes.run import run

pytestmark = pytest.mark.timeout(1800)  # the fixture runs eight programs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = lay_out(tmp_path_factory.mktemp("defaults"))
    with running(serving(tmp_path_factory.mktemp("served"))) as stack:
        code = run("defaults", stack.url, API_KEY, ["short"], work)
    assert code == 0, (work / "output").read_text()[-5000:]
    return work


@pytest.fixture(scope="module")
def ends(folder: Path) -> dict[str, Ended]:
    return ended(folder)


def test_every_program_but_those_with_an_unpublished_loss_ends_well(ends: dict[str, Ended]):
    assert {name: end.error for name, end in ends.items() if name not in REFUSED} == dict.fromkeys(METRICS, "")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_unpublished_loss_is_refused_before_a_token_is_sampled(name: str, ends: dict[str, Ended]):
    refused, accepted = ends[name], ends[name.removesuffix(" with its loss")]
    assert all(part in refused.error for part in ("400", "stable_reinforce", "set loss_fn=importance_sampling"))
    assert refused.sampled == 0 < accepted.sampled


@pytest.mark.parametrize("name", METRICS)
def test_every_step_of_a_program_is_trained(name: str, folder: Path):
    values, norms = logged(folder, name, METRICS[name]), logged(folder, name, "grad_norm")
    assert len(values) == STEPS
    assert all(map(math.isfinite, values))
    # dpo.train logs no metrics of the optimizer.
    assert len(norms) == (0 if name == "preferences" else STEPS)
    assert all(map(math.isfinite, norms))


@pytest.mark.parametrize("name", ["supervised loop", "chat"])
def test_supervised_losses_fall(name: str, folder: Path):
    first, last = logged(folder, name, METRICS[name])
    assert last < first


def test_dpo_starts_at_its_reference_and_leaves_it(folder: Path):
    first, last = logged(folder, "preferences", "dpo_loss")
    assert first == pytest.approx(math.log(2), abs=1e-5)
    assert last < first - 1e-3


def test_rl_reaches_some_answers_and_trains_on_them(folder: Path):
    rewards = logged(folder, "rl loop", "reward/total")
    assert 0 < max(rewards) < 1
    assert max(logged(folder, "rl loop", "grad_norm")) > 0


@pytest.mark.parametrize("name", ["distillation", "arithmetic"])
def test_samples_score_in_training_as_in_the_sampler(name: str, folder: Path):
    assert max(map(abs, logged(folder, name, "optim/kl_sample_train_v1"))) < 1e-4


def test_distillation_is_scored_by_another_model_than_the_one_it_trains(folder: Path):
    assert min(logged(folder, "distillation", "teacher_kl")) > 0.1
