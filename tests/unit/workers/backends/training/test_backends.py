"""Device choice of a rank, and its share of that device. There is no GPU here: stand-ins replace torch's calls."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from app.errors import SetupError, UnservableModel
from app.settings import BaseModelSettings, TrainerSettings
from tests.parity import architectures
from workers.backends.training import backends
from workers.backends.training.backends import rank_device
from workers.backends.training.engine import HiddenStates
from workers.backends.training.trainer import Trainer


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, torch.device]]:
    """Limits that torch received, on a machine that seems to have two GPUs."""
    fractions: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: fractions.append(args))
    return fractions


def test_a_rank_takes_no_more_of_its_gpu_than_its_share(
    limits: list[tuple[float, torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = rank_device(TrainerSettings(devices=(0, 1), memory_share=0.3))
    assert (device, limits) == (torch.device("cuda", 1), [(0.3, torch.device("cuda", 1))])


@pytest.mark.parametrize("devices", [(), (7, 3)])
def test_a_rank_has_the_gpu_of_its_number_among_those_it_sees_as_deepspeed_does(
    devices: tuple[int, ...], limits: list[tuple[float, torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_device(TrainerSettings(devices=devices)) == torch.device("cuda", 1)


def test_a_rank_without_a_gpu_is_a_setup_error(
    limits: list[tuple[float, torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(SetupError, match=r"rank 2 has no GPU: trainer\.devices is \[7, 3, 9\], but torch sees 2 here"):
        rank_device(TrainerSettings(devices=(7, 3, 9)))
    with pytest.raises(SetupError, match=r"rank 2 has no GPU: torch sees 2 here"):
        rank_device(TrainerSettings())


def test_a_rank_on_a_cpu_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", None)
    assert rank_device(TrainerSettings(memory_share=0.3)) == torch.device("cpu")


def test_deepspeed_computes_in_fp32_what_transformers_keeps_in_it(tmp_path: Path) -> None:
    """Inkling's convolutions, for example. Its sampler does the same."""
    base, found = architectures.build("inkling", tmp_path), []
    for trainer in ({"backend": "torch"}, {"backend": "deepspeed", "zero_stage": 1}):
        backend = backends.create(BaseModelSettings(name="t", path=str(base), dtype="bfloat16", trainer=trainer))
        backend.open()
        found.append(
            {name: (one.dtype, one.sum().item()) for name, one in backend._engine.base.model.named_parameters()}
        )
    assert found[0] == found[1]
    assert {dtype for dtype, _ in found[1].values()} == {torch.float32, torch.bfloat16}


def test_deepspeed_logs_nothing_below_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would list every setting and buffer."""
    logger, trainer = logging.getLogger("DeepSpeed"), {"backend": "deepspeed", "zero_stage": 1}
    base = architectures.build("llama", tmp_path)
    logger.addHandler(caplog.handler)
    before = logger.level
    logger.setLevel(logging.INFO)  # as a user's DS_LOG_LEVEL may set it
    try:
        backends.create(BaseModelSettings(name="t", path=str(base), trainer=trainer)).open()
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(before)
    assert [one for one in caplog.records if one.name == logger.name and one.levelno < logging.WARNING] == []


@pytest.mark.parametrize(
    ("case", "full", "why"),
    [
        ("bert", True, "attends to later tokens, so it has no next-token logprobs; choose a causal model"),
        ("roberta", True, "attends to later tokens, so it has no next-token logprobs; choose a causal model"),
        ("mamba2", False, "cannot run text alone: AttributeError"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_architecture_that_is_not_listed_is_refused_where_it_would_compute_nothing_of_use(
    case: str, full: bool, why: str, dtype: str, tmp_path: Path
) -> None:
    with pytest.raises(UnservableModel, match=f"base model 'q' {why}"):
        trainer(case, dtype, tmp_path, full=full).open()


@pytest.mark.parametrize(("case", "full"), [("gpt-neox", True), ("mamba2", True), ("phimoe", False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_architecture_that_is_not_listed_is_trained_if_it_is_causal(
    case: str, full: bool, dtype: str, tmp_path: Path
) -> None:
    assert trainer(case, dtype, tmp_path, full=full).open().name == "q"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("Connection reset by peer")])
def test_a_failure_of_the_machine_in_the_trial_of_an_architecture_refuses_no_model(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(HiddenStates, "_run", fail)
    with pytest.raises(type(error)) as raised:
        trainer("gpt-neox", "float32", tmp_path, full=True).open()
    assert raised.value is error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_encoder_is_refused_whatever_offset_its_logits_share(dtype: str, tmp_path: Path) -> None:
    model = architectures.random_model(architectures.config_of("bert"))
    torch.nn.init.constant_(model.cls.predictions.bias, -7.0)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnservableModel, match="attends to later tokens"):
        opening(tmp_path, dtype, full=True).open()


def trainer(case: str, dtype: str, folder: Path, *, full: bool) -> Trainer:
    return opening(architectures.build(case, folder), dtype, full=full)


def opening(base: Path, dtype: str, *, full: bool) -> Trainer:
    settings = BaseModelSettings(name="q", path=str(base), dtype=dtype, trainer={"backend": "torch"})
    return backends.create(settings, full=full)
