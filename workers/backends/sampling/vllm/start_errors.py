"""Errors of vLLM's start: carries the reason from vLLM's processes to the sampler, and explains it.

vLLM's processes import this module as they set up their logging, so it imports neither vllm nor torch.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from pydantic import ValidationError

from app.errors import SetupError, UnservableModel

_FILE_VARIABLE = "TINSMITH_VLLM_START_ERROR"
_SETTINGS = {"gpu_memory_utilization": "memory_share", "max_model_len": "max_context", "max_num_seqs": "max_batch"}
"""Our setting for each argument of vLLM that its messages name."""


class StartErrorHandler(logging.Handler):
    """Logging handler of vLLM's processes: writes the error that ended a start to the file of `explained`.

    The first one is the cause; a process that fails after it only says that another one failed.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # vLLM is about to end its processes; whatever happens here must not stop it
            path = os.environ[_FILE_VARIABLE]
            if record.exc_info and record.exc_info[1] and record.getMessage().endswith("failed to start."):
                with Path(path).open("x", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(_line(record.exc_info[1]))


@contextmanager
def explained(model: str) -> Iterator[None]:
    """Starts of vLLM in the block that fail raise UnservableModel or SetupError, which says the reason."""
    with tempfile.TemporaryDirectory(prefix="tinsmith-vllm-") as folder:
        file = Path(folder, "error")
        os.environ[_FILE_VARIABLE] = str(file)
        try:
            yield
        except ValidationError as error:  # of the model and the arguments, which vLLM checks before it reads weights
            raise UnservableModel(
                f"this build of vLLM does not serve the model {model}: {_reason(error)}. "
                "Set sampler.backend to transformers"
            ) from error
        except Exception as error:
            found = file.read_text(encoding="utf-8") if file.exists() else ""
            raise SetupError(_with_settings(f"vLLM did not start: {found or _line(error)}; see its log")) from error
        finally:
            del os.environ[_FILE_VARIABLE]


def _line(error: BaseException) -> str:
    """The error as the last line of its traceback."""
    return traceback.format_exception_only(error)[-1].strip()


def _with_settings(said: str) -> str:
    """Adds which of our settings are the arguments that vLLM names, which it spells in several ways."""
    plain = re.sub("[- ]", "_", said.lower())
    return "; ".join([said, *(f"{ours} sets {name}" for name, ours in _SETTINGS.items() if name in plain)])


def _reason(error: ValidationError) -> str:
    reason = error.errors()[0]["msg"].removeprefix("Value error, ").partition("\n")[0].partition(" Supported arch")[0]
    if "failed to be inspected" in reason and find_spec("torchvision") is None:
        # vLLM imports the model's classes in a process of its own, and only that one's log names the missing package.
        reason = "its classes for this model import torchvision, which is not installed"
    return reason.rstrip(".")
