"""The house rules of `make lint`, on small trees that break one rule each."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.house_rules import broken

GOOD = '"""A module."""\n'


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_tree_that_keeps_the_rules_has_nothing_to_say(tmp_path):
    names = ["workers/trainer.py", "workers/train/runner.py", *(f"app/api/m{i}.py" for i in range(15))]
    assert list(broken(tree(tmp_path, dict.fromkeys(names, GOOD + "\n" * 399)))) == []


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({f"app/api/m{i}.py": GOOD for i in range(16)}, "app/api: 16 modules; a folder has at most 15"),
        ({"app/long.py": GOOD + "\n" * 400}, "app/long.py: 401 lines; a module has at most 400"),
        ({"workers/loose.py": GOOD}, "workers/loose.py: only entry points lie here; move it into a folder"),
        ({"tests/test_it.py": '"""What it does."""\n'}, "tests/test_it.py:1: a module's docstring says what"),
        ({"ops/run.py": 'def run():\n    """The worker is told."""\n'}, "ops/run.py:2: 'is told'"),
        ({"app/it.py": GOOD + "class Doorbell: ...\n"}, "app/it.py:2: 'Doorbell' is home-made"),
        ({"workers/train/it.py": GOOD + "def _let_in(): ...\n"}, "workers/train/it.py:2: '_let_in' is home-made"),
        ({"ops/run.py": "x = 1\ny = 2  # for whom it waits\n"}, "ops/run.py:2: 'whom'"),
    ],
)
def test_each_broken_rule_is_reported_with_its_place(files, said, tmp_path):
    (found,) = broken(tree(tmp_path, files))
    assert found.startswith(said)


def test_generated_code_and_words_of_the_code_itself_are_left_alone(tmp_path):
    files = {"app/wire/x_pb2.py": GOOD + "\n" * 500, "app/it.py": 'doorbell = "for whom"\n'}
    assert list(broken(tree(tmp_path, files))) == []
