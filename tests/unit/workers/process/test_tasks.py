"""The tasks that Flower shares with the workers."""

from __future__ import annotations

import subprocess
import sys


def test_flower_needs_no_library_of_the_workers() -> None:
    """The `flower` extra installs neither torch nor transformers, and Flower imports the tasks."""
    probe = "import workers.process.tasks, sys; print(*{'torch', 'transformers', 'safetensors'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
