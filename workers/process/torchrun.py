"""`python -m workers.process.torchrun ...`: torchrun for the ranks of one machine, which listen on loopback only.

Its exit code says whether a rank found the setup wrong. torchrun itself ends with 1, whatever code its ranks ended
with; the process that started it would then try again.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

from app.stack.supervisor import SETUP_ERROR_CODE, UNSERVABLE_CODE
from workers.backends.training.ranks import serve_store, stay_on_this_machine

_ADDRESS = "127.0.0.1"


class _Loopback(RendezvousHandler):
    """The rendezvous of a group on this machine alone. torchrun's own (`--standalone`) listens on every interface."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store = serve_store(_ADDRESS)

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_ADDRESS, self._store.port))

    def get_backend(self) -> str:
        return "loopback"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def main() -> int:
    stay_on_this_machine()
    rendezvous_handler_registry.register("loopback", _Loopback)
    try:
        torchrun(["--rdzv-backend=loopback", *sys.argv[1:]])
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return next((code for code in (UNSERVABLE_CODE, SETUP_ERROR_CODE) if code in codes), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
