"""A stack starts from the file that `tinsmith init` writes, and trains."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.contract.data import train
from tests.contract.stack import Stack, running
from tests.servers import free_port


@dataclass
class Initialised(Stack):
    def _toml(self) -> str:
        file = self.data_dir.parent / "written.toml"
        command = [sys.executable, "-m", "app.cli", "init", str(file), "--model", str(self.base_path)]
        subprocess.run(command, check=True, capture_output=True)
        return file.read_text()


def test_a_stack_starts_from_the_written_file(base_path: Path, tmp_path: Path):
    stack = Initialised(tmp_path / "data", base_path, free_port(), program="tests.warm_workers")
    with running(stack), stack.client() as client:
        training = client.create_lora_training_client(base_model=base_path.name, rank=4, seed=1).result()
        train(training, 1)
    assert stack.settings().base_models[0].path == str(base_path)
