"""Two ranks compute what one process computes on images, also where only one rank's micro-batch has an image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests import pictures
from tests.conformance import image_ranks
from tests.conformance.groups import run_group
from tests.conformance.test_training_ranks import settings
from tests.parity.reference import relative_error
from workers.backends.training import backends


def test_two_ranks_that_share_all_weights_equal_one_process_on_images(tmp_path: Path) -> None:
    base = pictures.tiny_reader("qwen3-vl", tmp_path / "base")
    torch.set_num_threads(1)
    alone = backends.create(settings(base, backend="torch"))
    alone.open()
    wanted = image_ranks.run(alone)
    text = settings(base, backend="deepspeed", zero_stage=3, ranks=2).model_dump_json()
    assert run_group(image_ranks.main, text, str(tmp_path)) == [0, 0]
    with np.load(tmp_path / "found.npz") as stored:
        found = dict(stored)
    assert found.keys() == wanted.keys()
    first = {name: value for name, value in wanted.items() if "0" in name.split()[1]}
    assert relative_error({name: found[name] for name in first}, first) < 1e-5
    assert relative_error(found, wanted) < 1e-3
