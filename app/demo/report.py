"""The demo's results as text and as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from app.demo.data import PROMPTS

_WIDTH = 100
_CHART_ROWS = 8
_BLOCKS = " ▁▂▃▄▅▆▇█"


def print_answers(before: Sequence[str], after: Sequence[str]) -> None:
    for prompt, old, new in zip(PROMPTS, before, after, strict=True):
        print(f"\n\N{BLACK RIGHT-POINTING SMALL TRIANGLE} {prompt}")
        print(_paragraph("before: ", old))
        print(_paragraph("after:  ", new))


def print_parts(parts: Iterable[tuple[str, str]]) -> None:
    print("\nWhat ran")
    for name, text in parts:
        print(_paragraph(f"  {name:<13}", text))


def chart(values: Sequence[float], rows: int = _CHART_ROWS) -> str:
    """One column a value, from zero up; the greatest and zero are labelled."""
    top = max(values)
    heights = [round(value / top * rows * 8) for value in values]
    lines = []
    for row in reversed(range(rows)):
        label = f"{top * (row + 1) / rows:6.2f} "
        lines.append(label + "".join(_BLOCKS[min(8, max(0, height - 8 * row))] for height in heights))
    return "\n".join(lines)


def save_picture(losses: Sequence[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, marker=".")
    axes.set(xlabel="step", ylabel="loss (nats per answer token)", title="SmolLM2-135M learns a tinsmith's manner")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _paragraph(label: str, text: str) -> str:
    flat = " ".join(text.split())
    return textwrap.fill(flat, _WIDTH, initial_indent=label, subsequent_indent=" " * len(label))
