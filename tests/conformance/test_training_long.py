"""A datum of 32,768 tokens trains in memory that grows neither with its square nor with length times vocabulary."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.training_long import LENGTH

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600
# A token needs 4.5 KB here. The square of the length would need 4 GB.
BOUND = LENGTH * 6144


def needed(case: str, folder: Path, vocabulary: int) -> int:
    command = [sys.executable, "-m", "tests.conformance.training_long", case, str(folder), str(vocabulary)]
    # Else glibc keeps freed chunks of this size, as many as it likes.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("vocabulary", [320, 16_384])
def test_a_long_datum_trains_within_a_bound_that_does_not_grow_with_the_vocabulary(
    tmp_path: Path, vocabulary: int
) -> None:
    """The head's weight was there before the pass. All logits of the datum would need 2.1 GB with 16,384."""
    assert needed("llama", tmp_path / "base", vocabulary) < BOUND


@pytest.mark.parametrize(("case", "bound"), [("window", BOUND), ("hybrid", 2 * BOUND)])
def test_a_long_datum_of_a_window_or_a_recurrent_layer_trains_within_a_bound(
    tmp_path: Path, case: str, bound: int
) -> None:
    assert needed(case, tmp_path / "base", 320) < bound
