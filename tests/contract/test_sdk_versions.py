"""One program under every pinned release of the SDK (sdk_versions.txt).

Each SDK is installed without its dependencies into a separate folder, which comes first on its process' path. The
dependencies are those of the newest SDK, and each wheel's metadata is checked against the versions installed here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.contract.stack import API_KEY, BASE, Stack

HERE = Path(__file__).parent
RELEASES = [
    Version(line.removeprefix("tinker==").strip())
    for line in (HERE / "sdk_versions.txt").read_text().splitlines()
    if line.startswith("tinker==")
]
ARCHIVES_UNTIL = Version("0.35")
_AT_ONCE = 3
_LONGEST_S = 800


def test_the_newest_of_the_pinned_releases_is_the_one_all_other_tests_use():
    assert version("tinker") == str(max(RELEASES))


@pytest.mark.parametrize("stack", ["deepspeed-1-transformers"], indirect=True)
def test_a_program_sees_the_same_to_the_bit_whichever_release_of_the_sdk_it_runs_with(stack: Stack, tmp_path: Path):
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        seen = dict(zip(RELEASES, pool.map(partial(run, tmp_path, stack.url), RELEASES), strict=True))
    newest = seen[max(RELEASES)]
    check(newest)
    for release, found in seen.items():
        assert found["version"] == str(release)
        for name in ("before", "losses", "custom", "saved", "loaded", "tokens", "reasons", "base", "tokenizer", "left"):
            assert found[name] == newest[name], f"{release}: {name}"
        for name in ("logprobs", "prompt"):  # sampled in a batch with other releases' requests
            pairs = np.array(flat(found[name])), np.array(flat(newest[name]))
            np.testing.assert_allclose(*pairs, atol=1e-5, err_msg=f"{release}: {name}")
        assert [len(row or []) for row in found["top"]] == [len(row or []) for row in newest["top"]], release
        assert found["path"] in found["listed"], release
        assert ("archive" in found) == (release < ARCHIVES_UNTIL), release
    for found in (found for release, found in seen.items() if release < ARCHIVES_UNTIL):
        assert {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"} <= set(found["archive"])


def check(seen: dict[str, Any]) -> None:
    """Checks the results of the program."""
    assert seen["losses"][2] < seen["losses"][0]
    assert seen["loaded"] == seen["saved"] != seen["before"]
    assert seen["custom"][1] == 4.0
    assert [len(tokens) for tokens in seen["tokens"]] == [len(scores) for scores in seen["logprobs"]]
    # The sampler's scores of the prompt are the trainer's.
    np.testing.assert_allclose(seen["prompt"][1:], seen["saved"][0][:-1], atol=1e-3)
    assert [len(row or []) for row in seen["top"]] == [0] + [3] * (len(seen["top"]) - 1)


def flat(nested: Any) -> list[float]:
    """Flattens the scores, without the None of unscored tokens."""
    if isinstance(nested, list):
        return [number for part in nested for number in flat(part)]
    return [] if nested is None else [nested]


def run(folder: Path, url: str, release: Version) -> dict[str, Any]:
    """Runs the program and returns its observations."""
    home = folder / str(release)
    execute = partial(subprocess.run, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", "--no-deps"]
    installed = execute([*pip, "--target", str(home), f"tinker=={release}"])
    assert installed.returncode == 0, installed.stderr
    (wheel,) = distributions(path=[str(home)])
    for needed in map(Requirement, wheel.requires or []):
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            assert needed.specifier.contains(version(needed.name)), f"SDK {release} needs {needed}"
    environment = {**os.environ, "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}
    done = execute([sys.executable, str(HERE / "sdk_program.py"), url, API_KEY, BASE], env=environment)
    assert done.returncode == 0, f"SDK {release}:\n{done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
