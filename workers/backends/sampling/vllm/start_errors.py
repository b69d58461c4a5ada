"""Errors of vLLM's start: carries the reason from vLLM's processes to the sampler, and explains it.

vLLM's processes import this module as they set up their logging, so it imports neither vllm nor torch.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from pydantic import ValidationError

from app.errors import SetupError, UnservableModel

_FILE_VARIABLE = "TINSMITH_VLLM_START_ERROR"
# vLLM's names for our settings, as its messages spell them.
_SETTINGS = {
    r"(--)?gpu[_ -]memory[_ -]utilization": "memory_share",
    r"(--)?max[_-]model[_-]len\b": "max_context",
    r"(--)?max[_-]num[_-]seqs": "max_batch",
}


class StartErrorHandler(logging.Handler):
    """Logging handler of vLLM's processes: writes the error that ended a start to the file of `explained`.

    The first one is the cause; a process that fails after it only says that another one failed.
    """

    def emit(self, record: logging.LogRecord) -> None:
        path = os.environ.get(_FILE_VARIABLE)
        if path and record.exc_info and record.getMessage().endswith("failed to start."):
            with suppress(OSError), Path(path).open("x") as file:  # it is there, or the sampler has given up
                file.write(str(record.exc_info[1]))


@contextmanager
def explained(model: str) -> Iterator[None]:
    """Raises the error of a start in the block as an UnservableModel or a SetupError that says the reason."""
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
            reason = file.read_text() if file.exists() else str(error)
            for pattern, setting in _SETTINGS.items():
                reason = re.sub(pattern, setting, reason, flags=re.IGNORECASE)
            raise SetupError(f"vLLM did not start: {reason}; see its log") from error
        finally:
            del os.environ[_FILE_VARIABLE]


def _reason(error: ValidationError) -> str:
    reason = error.errors()[0]["msg"].removeprefix("Value error, ").partition("\n")[0].partition(" Supported arch")[0]
    if "failed to be inspected" in reason and find_spec("torchvision") is None:
        # vLLM imports the model's classes in a process of its own, and only that one's log names the missing package.
        reason = "its classes for this model import torchvision, which is not installed"
    return reason.rstrip(".")
