"""`python ops/requirements.py EXTRA,EXTRA` prints what the project requires with these extras, and what builds it.

pip checks the hash of all that it installs, or of nothing, and a folder has none. So the requirements are installed
first, with hashes.txt, and then the project alone. It runs before anything is installed.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OWN = re.compile(r"tinsmith\[([a-z,-]+)\]")


def of(project: dict[str, Any], extras: list[str]) -> Iterator[str]:
    """Yields each requirement, some of them twice; project is the table of pyproject.toml."""
    yield from project["dependencies"]
    for extra in extras:
        for one in project["optional-dependencies"][extra]:
            own = _OWN.fullmatch(one)
            yield from of(project, own[1].split(",")) if own else [one]


if __name__ == "__main__":
    described = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    extras = [one for one in sys.argv[1].split(",") if one]
    found = [*described["build-system"]["requires"], *of(described["project"], extras)]
    print("\n".join(dict.fromkeys(found)))
