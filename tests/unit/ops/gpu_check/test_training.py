"""Both sides train one model, which either of them makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ops.gpu_check import shapes, training


class Killed(BaseException):
    pass


def test_a_side_that_is_killed_while_it_writes_the_model_leaves_no_part_of_it_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(size: str, folder: Path, device: torch.device) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{")
        (folder / "part").touch()
        raise Killed

    seen: list[list[str]] = []

    def trained(size: str, model: str) -> list[training.Row]:
        seen.append(sorted(path.name for path in Path(model).iterdir()))
        return []

    monkeypatch.setattr(training, "_peft", trained)
    with monkeypatch.context() as dies:
        dies.setattr(shapes, "save", killed)
        with pytest.raises(Killed):
            training.main("tiny", str(tmp_path / "tiny"), training.TINSMITH)
    for _ in range(2):
        training.main("tiny", str(tmp_path / "tiny"), training.PEFT)
    assert seen == [["config.json", "generation_config.json", "model.safetensors"]] * 2
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["model"]
