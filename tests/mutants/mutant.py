"""A mutant: the code with one guard removed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` occurs in `file` exactly once; with `new` in its place, one of `tests` fails.

    `name` is the removed guard, `tests` are pytest's arguments. The test of a `slow` mutant waits a minute in vain
    before it fails: only `make mutants` runs it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    slow: bool = False

    @property
    def folder(self) -> str:
        """The folder of its tests."""
        return self.tests.rpartition(" ")[2].partition("::")[0].rpartition("/")[0]
