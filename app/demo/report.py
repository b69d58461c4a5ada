"""Shows the demo's results as text, as a picture and as JSON."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from app.demo import model
from app.demo.training import HABIT, PROMPTS
from app.stack.terminal import visible

_WIDTH = 100
_CHART_ROWS = 8
_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Result:
    """One run of the demo: answers to PROMPTS, the mean loss of an answer's token (nats) at every step, and the
    `tinker://` paths to train on from and to sample from."""

    url: str
    answers_before: list[str]
    answers_after: list[str]
    losses: list[float]
    checkpoint: str
    adapter: str
    seconds: float

    @property
    def habit_before(self) -> int:
        return sum(HABIT in answer for answer in self.answers_before)

    @property
    def habit_after(self) -> int:
        return sum(HABIT in answer for answer in self.answers_after)

    def save(self, path: Path) -> None:
        """Saves the result as JSON, for programs."""
        shown = {"habit": HABIT, "habit_before": self.habit_before, "habit_after": self.habit_after}
        about = {"base_model": model.NAME, "prompts": PROMPTS, "steps": len(self.losses)}
        path.write_text(json.dumps({**about, **asdict(self), **shown}, indent=2, ensure_ascii=False) + "\n", "utf-8")


def print_answers(before: Sequence[str], after: Sequence[str]) -> None:
    for prompt, old, new in zip(PROMPTS, before, after, strict=True):
        print(f"\n\N{BLACK RIGHT-POINTING SMALL TRIANGLE} {prompt}")
        print(_paragraph("before: ", old))
        print(_paragraph("after:  ", new))


def print_parts(parts: Iterable[tuple[str, str]]) -> None:
    print("\nThe parts of the stack")
    for name, text in parts:
        print(_paragraph(f"  {name:<13}", text))


def chart(values: Sequence[float], rows: int = _CHART_ROWS) -> str:
    """A text chart with one column for each value, from zero up. The greatest value and zero are labelled."""
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


def print_end(result: Result, data_dir: Path) -> None:
    """Prints the location of the results, and the change of the answers."""
    losses, asked = result.losses, len(PROMPTS)
    print(f"\nLoss of an answer's token (nats) in {len(losses)} steps\n{chart(losses)}")
    print(
        f"\nTo go on training:  {result.checkpoint}\nTo sample from:     {result.adapter}\n"
        f"To start this stack again: {_program()} up --data-dir {data_dir}\n"
        f"In {data_dir}: demo.json (these results), loss.png, api-key, logs\n"
        f"The SDK calls behind this: {Path(__file__).with_name('training.py')}\n"
    )
    print(
        f"Done in {result.seconds:.0f} s: the loss went from {losses[0]:.2f} to {losses[-1]:.2f}, and {HABIT!r} ends "
        f"{result.habit_after} of {asked} answers ({result.habit_before} of {asked} before)."
    )


def _program() -> str:
    """The name of `tinsmith` in a shell: that of its file, unless the shell finds this file by itself."""
    file = Path(sys.executable).with_name("tinsmith")
    if shutil.which("tinsmith") == str(file) or not file.exists():
        return "tinsmith"
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def _paragraph(label: str, text: str) -> str:
    flat = visible(" ".join(text.split()))
    return textwrap.fill(flat, _WIDTH, initial_indent=label, subsequent_indent=" " * len(label))
