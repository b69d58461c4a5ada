"""The README example runs unchanged, except for the names of the model, the server and the key file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.contract.stack import API_KEY, BASE, Stack

README = Path(__file__).parents[2] / "README.md"


def test_the_example_trains_and_samples(stack: Stack, tmp_path: Path):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    key = tmp_path / "api-key"
    key.write_text(API_KEY)
    for there, here in (
        ("HuggingFaceTB/SmolLM2-135M-Instruct", BASE),
        ("http://127.0.0.1:8000", stack.url),
        ("tinsmith-data/api-key", str(key)),
    ):
        assert there in example
        example = example.replace(there, here)
    ran = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    losses = [float(line.split()[1]) for line in ran.stdout.splitlines()[:5]]
    assert losses[-1] < losses[0]
