from __future__ import annotations

import os
import subprocess
import sys

from app.settings import BaseModelSettings
from workers.backends.sampling.vllm.engine import set_environment


def test_an_engine_that_dies_does_not_log_what_it_was_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    set_environment(BaseModelSettings(name="n", path=str(tmp_path)))
    code = """
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging, init_logger
configure_logging(LoggingConfig())  # as every process of its engine does
init_logger("vllm.logging_utils.dump_input").error("SECRET")
init_logger("vllm.v1.engine.core").error("DIED")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=True)
    assert "ERROR" in run.stdout
    assert "DIED" in run.stdout
    assert "SECRET" not in run.stdout + run.stderr
