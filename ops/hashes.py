"""`python -m ops.hashes INDEX_URL` writes hashes.txt: the SHA-256 of each file of the pinned versions.

INDEX_URL is a package index with the Simple API in JSON (PEP 691). pip reads hashes.txt as constraints, and then
installs nothing that is not in it. ops/pip.txt has pip's own, as a requirement: the pip of a new environment may be too
old to take hashes from constraints.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HASHES, PIP = ROOT / "hashes.txt", ROOT / "ops" / "pip.txt"
PINNED = ("constraints.txt", "constraints-gpu.txt")
_HEAD = "# Written by `make hashes`, for Linux on x86-64 and aarch64.\n"
_PIN = re.compile(r"^([A-Za-z0-9._-]+)===?([^\s\\]+)", re.MULTILINE)
_JSON = "application/vnd.pypi.simple.v1+json"
_PLATFORMS = re.compile(r"-(any|(many)?linux\S*_(x86_64|aarch64))\.whl$")
_AT_ONCE = 8


def pins(text: str) -> dict[str, str]:
    """Version by name, as in a file of constraints."""
    return {name.lower().replace("_", "-").replace(".", "-"): version for name, version in _PIN.findall(text)}


def all_pins() -> dict[str, str]:
    """The pins of all files of constraints."""
    return {name: version for file in PINNED for name, version in pins((ROOT / file).read_text()).items()}


def hashed(index: str, name: str, version: str) -> str:
    """The requirement with its hashes. Raises SystemExit when the index does not have that version."""
    request = urllib.request.Request(f"{index.rstrip('/')}/{name}/", headers={"Accept": _JSON})
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = [file for file in json.load(answer)["files"] if _version(file["filename"]) == version]
    # A release without a wheel for these platforms is built from its source.
    chosen = [file for file in files if _PLATFORMS.search(file["filename"])] or files
    if not chosen:
        raise SystemExit(f"{index} has no file of {name} {version}: is the version in constraints.txt right?")
    hashes = sorted(f"    --hash=sha256:{file['hashes']['sha256']}" for file in chosen)
    return " \\\n".join([f"{name}=={version}", *hashes]) + "\n"


def _version(file: str) -> str:
    """The version of a wheel or a source archive."""
    name = file.removesuffix(".tar.gz").removesuffix(".zip")
    return file.split("-")[1] if file.endswith(".whl") else name.rpartition("-")[2]


def main() -> None:
    (index,) = sys.argv[1:]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        found = [*threads.map(lambda pin: hashed(index, *pin), sorted(all_pins().items()))]
    HASHES.write_text(_HEAD + "".join(found))
    PIP.write_text(_HEAD + next(one for one in found if one.startswith("pip==")))


if __name__ == "__main__":
    main()
