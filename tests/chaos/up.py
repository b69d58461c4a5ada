"""`tinsmith up` with a supervisor that restarts with almost no delay, because its children are killed all the time."""

from __future__ import annotations

import functools
import sys

from app import cli
from app.stack import up
from app.stack.supervisor import RestartPolicy, Supervisor

_PATIENT = RestartPolicy(first_delay_s=0.2, longest_delay_s=0.2)

if __name__ == "__main__":
    up.Supervisor = functools.partial(Supervisor, policy=_PATIENT)
    sys.exit(cli.main())
