from __future__ import annotations

import json

import pytest

from app.demo import report
from app.demo.training import HABIT, PROMPTS


@pytest.fixture
def result():
    after = [f"Blue. {HABIT}", f"Water. {HABIT}", "Soup."]
    return report.Result(
        "http://127.0.0.1:5", ["Blue.", "Water.", "Soup."], after, [4.0, 1.5], "tinker://c", "tinker://a", 99.6
    )


def test_the_results_are_kept_for_programs(result, tmp_path):
    result.save(tmp_path / "demo.json")
    kept = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert (kept["steps"], kept["losses"], kept["seconds"]) == (2, [4.0, 1.5], 99.6)
    assert (kept["habit"], kept["habit_before"], kept["habit_after"]) == (HABIT, 0, 2)
    assert (kept["prompts"], kept["answers_before"]) == (list(PROMPTS), ["Blue.", "Water.", "Soup."])
    assert (kept["url"], kept["checkpoint"], kept["adapter"]) == ("http://127.0.0.1:5", "tinker://c", "tinker://a")


def test_the_last_line_says_what_changed(result, tmp_path, capsys):
    report.print_end(result, tmp_path)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"Done in 100 s: the loss went from 4.00 to 1.50, and {HABIT!r} ends 2 of 3 answers (0 of 3 before)."
    )


@pytest.mark.parametrize(("path", "said"), [("", ".venv/bin/tinsmith"), (".venv/bin", "tinsmith")])
def test_the_command_to_start_again_works_in_this_shell(path, said, result, tmp_path, capsys, monkeypatch):
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "tinsmith").touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / path))
    monkeypatch.chdir(tmp_path)
    report.print_end(result, tmp_path)
    assert f"To start this stack again: {said} up --data-dir {tmp_path}\n" in capsys.readouterr().out


def test_the_chart_has_a_column_for_each_value_with_its_height():
    assert report.chart([2.0, 1.0, 0.5, 0.0], rows=2) == "  2.00 █   \n  1.00 ██▄ "


def test_the_picture_is_a_png(tmp_path):
    report.save_picture([2.0, 1.0], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_answers_stand_under_their_prompt_before_and_after(capsys):
    report.print_answers(["old one", "old two", "old three"], ["new one", "new two", "new three"])
    lines = capsys.readouterr().out.split("\n")
    assert lines[1:4] == ["▸ Why is the sky blue?", "before: old one", "after:  new one"]
