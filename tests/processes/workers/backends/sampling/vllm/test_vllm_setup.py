from __future__ import annotations

import os
import subprocess
import sys

import pytest

from app.settings import BaseModelSettings
from workers.backends.sampling.vllm.engine import set_environment

CODE = """
import os
from vllm import envs
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging, init_logger
configure_logging(LoggingConfig())  # as every process of its engine does
init_logger("vllm.logging_utils.dump_input").error("SECRET")
init_logger("vllm.v1.engine.core").error("DIED")
print("unknown:", [name for name in os.environ if name.startswith("VLLM_") and name not in envs.environment_variables])
print("start method:", envs.VLLM_WORKER_MULTIPROC_METHOD)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A process with vLLM in the environment that a sampler sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        set_environment(BaseModelSettings(name="n", path=str(tmp_path_factory.mktemp("model"))))
        environment = dict(os.environ)
    return subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=True)


def test_an_engine_that_dies_does_not_log_what_it_was_asked(run: subprocess.CompletedProcess[str]) -> None:
    assert "ERROR" in run.stdout
    assert "DIED" in run.stdout
    assert "SECRET" not in run.stdout + run.stderr


def test_vllm_knows_each_variable_and_forks_no_process(run: subprocess.CompletedProcess[str]) -> None:
    assert "unknown: []" in run.stdout
    assert "start method: spawn" in run.stdout
