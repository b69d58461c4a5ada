"""`tinsmith up` for children that are killed all the time: it restarts them with almost no delay, and workers warm."""

from __future__ import annotations

import functools
import sys

from app import cli
from app.stack import supervisor, up
from app.stack.supervisor import RestartPolicy, Supervisor
from tests import warm_workers

_PATIENT = RestartPolicy(first_delay_s=0.2, longest_delay_s=0.2)

if __name__ == "__main__":
    warm_workers.import_slow()
    supervisor.Child = warm_workers.WarmChild
    up.Supervisor = functools.partial(Supervisor, policy=_PATIENT)
    sys.exit(cli.main())
