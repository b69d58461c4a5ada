"""A mutant: the code with one guard removed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` stands in `file` exactly once; without it (`new` in its place) one of `tests` fails.

    `name` is the guard that is gone, `tests` the arguments for pytest.

    A `slow` one's test waits a minute in vain before it fails: `make mutants` alone runs it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    slow: bool = False
