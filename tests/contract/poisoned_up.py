"""`tinsmith up` with trainers that die on every batch that begins with POISON, however often they are restarted.

Run as `python -m tests.contract.poisoned_up trainer ...`, it is one of these trainers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from app import cli
from app.domain.ops import ForwardBackward
from app.settings import Settings
from app.stack import up
from app.stack.child import Command
from tests import warm_workers

POISON = 298


def _poisoned_table(settings: Settings, settings_file: Path) -> Iterator[Command]:
    for command in _table(settings, settings_file):
        argv = command.argv
        if "workers.trainer" in argv:
            at = argv.index("workers.trainer")
            argv = (*argv[:at], "tests.contract.poisoned_up", "trainer", *argv[at + 1 :])
        yield replace(command, argv=argv)


def _trainer() -> None:
    from workers import cli as workers_cli
    from workers.backends.training.trainer import Trainer

    run = Trainer.apply

    def apply(self: Trainer, ops: Mapping[str, Any]) -> Any:
        for op in ops.values():
            if isinstance(op, ForwardBackward) and op.batch.tokens.values[0] == POISON:
                os._exit(9)
        return run(self, ops)

    Trainer.apply = apply
    workers_cli.run_trainer()


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        del sys.argv[1]
        _trainer()
    else:
        warm_workers.use()
        _table, up.process_table = up.process_table, _poisoned_table
        sys.exit(cli.main())
