"""`python -m workers.trainer --base NAME --name NAME [--copy N] [--full]`: starts a trainer with its ranks."""

from __future__ import annotations

from workers.cli import run_trainer

if __name__ == "__main__":
    run_trainer()
