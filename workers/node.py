"""`python -m workers.node`: runs one host's ranks of a rank group; started over ssh."""

from __future__ import annotations

import sys

from workers.process.multinode import main

if __name__ == "__main__":
    sys.exit(main())
