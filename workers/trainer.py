"""`python -m workers.trainer --base NAME --name NAME [--full]`: starts one trainer with any number of ranks."""

from __future__ import annotations

from workers.cli import run_trainer

if __name__ == "__main__":
    run_trainer()
