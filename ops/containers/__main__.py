"""`python -m ops.containers images|up|train|down`; the Makefile's targets call it."""

from __future__ import annotations

import argparse
import sys

from ops.containers import images, stack
from ops.containers.shell import run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.containers", description=__doc__)
    parser.add_argument("command", choices=["images", "up", "train", "down"])
    match parser.parse_args().command:
        case "images":
            images.build()
        case "up":
            stack.up()
        case "train":
            train()
        case "down":
            stack.down()


def train() -> None:
    """Starts the stack, tests it from the network of its ports, and removes it."""
    engine = stack.up()
    try:
        run([*engine.enter, sys.executable, "-m", "ops.containers.trial"])
    finally:
        stack.down()


if __name__ == "__main__":
    main()
