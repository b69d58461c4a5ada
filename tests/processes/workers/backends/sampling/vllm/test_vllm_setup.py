from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from app.settings import BaseModelSettings
from tests.models import tiny_qwen3
from tests.parity import architectures
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


RANK = """
import torch
from vllm.v1.sample.ops.logprobs import batched_count_greater_than
print("rank:", batched_count_greater_than(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[2.0]])).tolist())
"""


def test_a_sampled_tokens_rank_needs_no_compiler_on_a_cpu(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        set_environment(BaseModelSettings(name="n", path=str(tmp_path)))
        environment = {**os.environ, "CXX": "/no/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, env=environment, check=True)
    assert "rank: [2]" in ran.stdout


START = """
import json, sys
from app.errors import SetupError
from app.settings import BaseModelSettings
from workers.backends.sampling.vllm.arguments import engine_args
from workers.backends.sampling.vllm.engine import EngineThread
from workers.models import base_model
if __name__ == "__main__":  # vLLM's processes import this file too
    settings = BaseModelSettings(name="n", path=sys.argv[1])
    try:
        EngineThread({**engine_args(settings, base_model.skeleton(settings), 64, "float32"), **json.loads(sys.argv[2])})
    except SetupError as error:
        print("refused:", type(error).__name__, " ".join(str(error).split()))
"""


def refusal(folder: Path, **engine_args: int) -> str:
    """Starts vLLM for the model in the folder, in a process; returns the line in which it is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        set_environment(BaseModelSettings(name="n", path=str(folder)))
        environment = dict(os.environ)
    script = folder / "start.py"
    script.write_text(START)
    command = [sys.executable, str(script), str(folder), json.dumps(engine_args)]
    output = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    (line,) = (line for line in output.splitlines() if line.startswith("refused:"))
    return line


def test_a_model_that_vllms_build_does_not_know_is_refused_in_one_line(tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(architectures.build("llama", tmp_path))
    config.architectures = ["UnheardOfForCausalLM"]
    config.save_pretrained(tmp_path)
    line = refusal(tmp_path)
    assert line.startswith("refused: UnservableModel")
    assert "UnheardOfForCausalLM" in line
    assert line.endswith("Set sampler.backend to transformers")
    assert len(line) < 400


def test_a_start_that_fails_in_vllms_own_process_says_why(tmp_path: Path) -> None:
    """vLLM itself says "Engine core initialization failed. See root cause above", and the cause in its log alone."""
    line = refusal(Path(tiny_qwen3(tmp_path)), num_gpu_blocks_override=1)
    said = "refused: SetupError vLLM did not start: ValueError: No available memory for the cache blocks."
    assert line.startswith(said)
    assert line.endswith("; see its log; memory_share sets gpu_memory_utilization")
