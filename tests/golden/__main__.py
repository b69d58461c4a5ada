"""`python -m tests.golden FOLDER`: writes every frozen contract as the present code makes it."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden import names, public, scripts, values
from tests.servers import start_valkey


def made() -> dict[str, Any]:
    """Contracts by the names of their files."""
    with tempfile.TemporaryDirectory() as folder, start_valkey(Path(folder), durable=False) as url:
        return {
            "codec": values.goldens(),
            "names": names.goldens(),
            "public": public.goldens(),
            "scripts": scripts.goldens(url),
        }


if __name__ == "__main__":
    for name, found in made().items():
        (Path(sys.argv[1]) / f"{name}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
