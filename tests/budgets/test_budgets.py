"""A GPU gets few large kernels, keeps few bytes, holds all tensors, and the host seldom waits for it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from app.domain.losses import CUSTOM, LOSSES
from ops.scaling import Model, Settings
from tests.parity.architectures import CASES, config_of

Counts = dict[str, dict[str, float]]
Placed = dict[str, tuple[str, int]]


def printed(module: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return printed("tests.budgets")


@pytest.fixture(scope="module")
def placed() -> Placed:
    return printed("tests.budgets.placement")


@pytest.fixture
def counts(measured: dict[str, Any]) -> Counts:
    found: Counts = measured["counts"]
    return found


def test_more_tokens_need_no_more_kernels(counts: Counts) -> None:
    few, many = counts["1 tenant, uneven datums"], counts["1 tenant, 4 times the tokens"]
    assert {**many, "waits": 0} == {**few, "waits": 0}


def test_thousands_of_tokens_are_one_micro_batch(counts: Counts) -> None:
    """A further one would be a further wait."""
    assert counts["1 tenant, 4 times the tokens"]["waits"] == counts["1 tenant"]["waits"]


def test_the_host_waits_once_a_micro_batch_and_twice_a_pass(counts: Counts) -> None:
    """For the rows without a gradient, and for the results and the gradients' norms of all tenants; never for a copy to
    the device."""
    assert {case["waits"] for case in counts.values()} == {3}


def test_the_host_waits_once_for_the_steps_of_all_tenants(measured: dict[str, Any]) -> None:
    """For the norms of their weights. It knows those of their gradients from the pass, unless several passes made them:
    a sum may have no norm, which refuses the step."""
    assert {case: found["waits"] for case, found in measured["steps"].items()} == {
        "1 tenant": 1,
        "16 uneven tenants": 1,
        "16 uneven tenants, 2 passes": 2,
    }


def test_a_step_walks_over_its_pieces_once_for_norms(measured: dict[str, Any]) -> None:
    """One kernel for 64 of 256 pieces; twice as many where the norms of gradients are not known."""
    assert {case: found["norms"] for case, found in measured["steps"].items()} == {
        "1 tenant": 1,
        "16 uneven tenants": 4,
        "16 uneven tenants, 2 passes": 8,
    }


def test_the_steps_of_16_tenants_have_few_more_kernels_than_that_of_one(measured: dict[str, Any]) -> None:
    """One for 64 pieces, of which a tenant has 16. Two learning rates are two calls of AdamW."""
    assert measured["steps"]["1 tenant"]["kernels"] <= 7
    assert measured["steps"]["16 uneven tenants"]["kernels"] <= 17


def test_the_host_waits_three_times_for_a_copy_of_a_model_however_many_tensors_it_has(measured: dict[str, Any]) -> None:
    """Once for each of two moments, and once for its weights and gradient."""
    assert measured["captures"] == [3, 3]


def test_a_layer_with_one_tenant_has_few_kernels(counts: Counts) -> None:
    """Eleven add the gradients of seven linears to those of the pass."""
    assert counts["1 tenant"]["layer"] <= 193


def test_a_layer_with_16_tenants_has_few_more(counts: Counts) -> None:
    """However many tokens each tenant has. In runs of equal ones, uneven tenants had 2,222."""
    assert counts["16 tenants"]["layer"] <= 226
    assert counts["16 uneven tenants"]["layer"] == counts["16 tenants"]["layer"]


def test_a_layer_of_fused_kernels_has_at_most_80(measured: dict[str, Any]) -> None:
    """The default on a GPU, where `tests/gpu` counts them again. With 16 tenants it has 33 more: its 33 products with
    adapters are grouped, which takes two kernels each."""
    assert measured["fused layers"]["1 tenant"] <= 80
    assert measured["fused layers"]["16 uneven tenants"] <= 113


def test_head_and_losses_have_few_kernels_for_each_tenant(counts: Counts) -> None:
    """They are all kernels outside of layers. Each Op has its own loss with own settings and results, which take 49,
    the head's adapters are 17 each, and the gradients of all linears together five. Targets reach the device once for
    all Ops."""
    assert counts["1 tenant"]["rest"] <= 148
    assert max(case["rest"] for case in counts.values()) <= 148 + 15 * 72


def test_a_layer_attends_once_whatever_the_lengths_of_its_datums(counts: Counts) -> None:
    assert {case["attention"] for case in counts.values()} == {1}
    assert counts["1 tenant, uneven datums"]["layer"] == counts["1 tenant"]["layer"]


def test_sinks_of_16_uneven_datums_are_few_kernels(counts: Counts) -> None:
    """Four more than without sinks. In a call for each length the layer had 593."""
    assert counts["1 tenant, 16 uneven datums, sinks"]["layer"] <= 251


def test_a_layer_keeps_few_bytes_of_a_token_however_many_tenants_there_are(counts: Counts) -> None:
    """In bf16, of 64 hidden numbers and 96 of the MLP, with 4 heads of 16 for 2 of keys, adapters of rank 8, and
    without a GPU's fused kernels:

    - 928 bytes: inputs of the norms in fp32, and their roots
    - 400: attention's query, key, value and result, and its sums
    - 576: the MLP's gate, before and after its activation, and what it multiplies
    - 448: inputs of the other linears, which adapters need
    - 112: their products with A

    With experts 1,164 in the place of the MLP's: two rows a token. gpt-oss computes its experts' activation in more
    steps.
    """
    kept = {case: found["kept"] for case, found in counts.items()}
    assert kept.pop("16 uneven tenants, experts") <= 2684
    assert kept.pop("1 tenant, 16 uneven datums, sinks") <= 4436
    assert max(kept.values()) <= 2464


@pytest.mark.parametrize(
    ("case", "family", "off"), [("1 tenant", "qwen3", 0.0), ("16 uneven tenants, experts", "qwen3-moe", 0.04)]
)
def test_a_layer_on_paper_keeps_the_bytes_of_one_that_runs(counts: Counts, case: str, family: str, off: float) -> None:
    """Those of docs/scaling.md, without a GPU's fused kernels. Experts keep a few numbers of each token besides."""
    found = Model(config_of(family)).kept(Settings(rank=8), fused=False)
    assert (1 - off) * counts[case]["kept"] <= found <= counts[case]["kept"]


def test_attention_equals_the_formula(measured: dict[str, Any]) -> None:
    """In one call, with grouped heads, datums of any lengths, windows and sinks; and in a call for each length."""
    cases = {"None", "3", "8", "None, sinks", "3, sinks", "8, sinks", "a call for each length"}
    assert measured["attention errors"].keys() == cases
    assert max(measured["attention errors"].values()) < 0.01


def test_training_mixes_no_tensors_of_two_devices_and_leaves_all_on_the_gpu(placed: Placed) -> None:
    """Every family, loss, kind of model and dtype of the base; images, given experts, and layers in part and again."""
    errors = {case: error for case, (error, _) in placed.items()}
    assert "got tensors of two devices" in errors.pop("two devices"), "the stand-in is no GPU"
    assert errors.keys() > {*CASES, *LOSSES} - {CUSTOM}
    assert {case: error for case, error in errors.items() if error} == {}


MORE_WAITS = {
    "custom loss": 2,  # for the logprobs of each of two Ops: their losses run on the CPU
    "offloaded": 42,  # each of 21 weights comes to the device, and its gradient goes
    "images": 12 + 3 * 2,  # in transformers' vision tower, which has two layers
    "gemma3, vision": 1,  # in transformers
    "helium (unlisted)": 2,  # padded, in an attention mask of transformers and for the tokens without padding
}


def test_the_host_seldom_waits_in_a_pass_of_any_kind(placed: Placed) -> None:
    """Thrice, as above, where the pass is one micro-batch; a few kinds have more waits for the given reason."""
    waits = {case: number for case, (_, number) in placed.items()}
    assert waits["cross_entropy"] == 3
    assert {case: number for case, number in waits.items() if number > 3 + MORE_WAITS.get(case, 0)} == {}
