"""`python -m workers.process.torchrun ...`: torchrun, with an exit code that says whether a rank found the setup wrong.

torchrun itself ends with 1, whatever code its ranks ended with; the process that started it would then try again.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from app.stack.supervisor import SETUP_ERROR_CODE, UNSERVABLE_CODE


def main() -> int:
    try:
        torchrun()
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return next((code for code in (UNSERVABLE_CODE, SETUP_ERROR_CODE) if code in codes), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
