from __future__ import annotations

import pytest

from app.errors import BadRequest
from app.ids import TinkerPath

RUN = "0b9d1f5e-9d8e-4c61-8a52-1f0a5f1ab3cd:train:12"


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("tinker://nope/weights/x", "'nope' is not a training run id, which is <session>:train:<n>"),
        (f"tinker://{RUN}/wieghts/x", "'wieghts' is not a kind of checkpoint: use weights, sampler_weights or"),
        (f"tinker://{RUN}/weights/-x", "'-x' is not a checkpoint name"),
        (f"tinker://{RUN}/x", "expected tinker://<training run>/<kind>/<name>"),
        (f"https://{RUN}/weights/x", "expected tinker://<training run>/<kind>/<name>"),
    ],
)
def test_the_wrong_part_of_a_checkpoint_path_is_named(path: str, wrong: str) -> None:
    with pytest.raises(BadRequest) as refused:
        TinkerPath.parse(path)
    assert wrong in str(refused.value)


def test_a_checkpoint_path_is_read_as_it_was_written() -> None:
    path = f"tinker://{RUN}/external_weights/step-6"
    assert str(TinkerPath.parse(path)) == path
