from __future__ import annotations

import logging
from pathlib import Path

import pytest
from pydantic import BaseModel, field_validator

from app.errors import SetupError, UnservableModel
from workers.backends.sampling.vllm.start_errors import StartErrorHandler, explained


@pytest.fixture
def vllm_process() -> logging.Logger:
    """The logger of a process of vLLM."""
    logger = logging.Logger("vllm.v1.engine.core")
    logger.addHandler(StartErrorHandler())
    return logger


def fail(process: logging.Logger, error: Exception, said: str) -> None:
    try:
        raise error
    except Exception:
        process.exception(said)


def test_the_first_process_that_fails_gives_the_reason(vllm_process: logging.Logger) -> None:
    free = "Free memory (2/80 GiB) is less than desired GPU memory utilization (0.9, 72 GiB)"
    with pytest.raises(SetupError) as raised, explained("m"):
        fail(vllm_process, OSError("no such port"), "A port is tried again")
        fail(vllm_process, ValueError(free), "WorkerProc failed to start.")
        fail(vllm_process, RuntimeError("a worker failed"), "EngineCore failed to start.")
        raise RuntimeError("Engine core initialization failed. See root cause above.")
    said = f"vLLM did not start: ValueError: {free}; see its log; memory_share sets gpu_memory_utilization"
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        ("decrease `max_num_seqs`", "; max_batch sets max_num_seqs"),
        ("Lower --max-model-len", "; max_context sets max_model_len"),
        ("out of ports", ""),
    ],
)
def test_an_error_of_the_samplers_own_process_is_said_with_our_settings(said: str, ours: str) -> None:
    with pytest.raises(SetupError) as raised, explained("m"):
        raise ValueError(said)
    assert str(raised.value) == f"vLLM did not start: ValueError: {said}; see its log{ours}"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(AssertionError(), "AssertionError"), (ValueError("model \udce9"), r"ValueError: model \udce9")],
    ids=["without a text", "of a name that is no UTF-8"],
)
def test_whatever_the_error_is_it_is_named(vllm_process: logging.Logger, error: Exception, reason: str) -> None:
    with pytest.raises(SetupError) as raised, explained("m"):
        fail(vllm_process, error, "EngineCore failed to start.")
        raise RuntimeError("Engine core initialization failed. See root cause above.")
    assert str(raised.value) == f"vLLM did not start: {reason}; see its log"


def test_an_error_that_cannot_be_written_stops_no_process(
    vllm_process: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SetupError, match="RuntimeError: Engine core"), explained("m"):
        monkeypatch.setenv("TINSMITH_VLLM_START_ERROR", str(tmp_path / "none" / "error"))
        fail(vllm_process, ValueError("lost"), "EngineCore failed to start.")
        raise RuntimeError("Engine core initialization failed. See root cause above.")


def test_no_file_is_left_and_an_error_of_a_running_engine_is_not_its_starts(
    vllm_process: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with explained("m"):
        assert list(tmp_path.iterdir())
    fail(vllm_process, ValueError("later"), "EngineCore failed to start.")
    assert not list(tmp_path.iterdir())


class Uninspected(BaseModel):
    """vLLM's error for a model whose classes cannot be imported."""

    model: str

    @field_validator("model")
    @classmethod
    def inspect(cls, model: str) -> str:
        raise ValueError(
            f"Model architectures ['{model}'] failed to be inspected. Please check the logs for more details."
        )


def test_a_model_whose_classes_need_torchvision_is_refused_with_that_reason() -> None:
    with pytest.raises(UnservableModel) as found, explained("mistral-3"):
        Uninspected(model="Mistral3")
    assert all(part in str(found.value) for part in ("mistral-3", "torchvision", "transformers"))
