"""`python -m workers.sampler --base NAME --name NAME [--copy N] [--full]`: starts one sampler."""

from __future__ import annotations

from workers.cli import run_sampler

if __name__ == "__main__":
    run_sampler()
