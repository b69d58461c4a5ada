from __future__ import annotations

from app.demo import report


def test_the_chart_has_a_column_for_each_value_with_its_height():
    assert report.chart([2.0, 1.0, 0.5, 0.0], rows=2) == "  2.00 █   \n  1.00 ██▄ "


def test_the_picture_is_a_png(tmp_path):
    report.save_picture([2.0, 1.0], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_answers_stand_under_their_prompt_before_and_after(capsys):
    report.print_answers(["old one", "old two", "old three"], ["new one", "new two", "new three"])
    lines = capsys.readouterr().out.split("\n")
    assert lines[1:4] == ["▸ Why is the sky blue?", "before: old one", "after:  new one"]
