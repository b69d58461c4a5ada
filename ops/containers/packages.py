"""Debian packages for a private Docker engine. Needs root."""

from __future__ import annotations

import platform
import shutil
import tempfile
from pathlib import Path

from ops.containers.shell import answer, run

# Keyed by the program that shows that the package is installed.
_PACKAGES = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "iptables": "iptables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "mmdebstrap": "mmdebstrap",
}
# The first release of Debian whose docker-compose is version 2.
_RELEASE_WITH_COMPOSE = "trixie"
_COMPOSE = "docker-compose"


def install() -> None:
    """Installs missing packages. Raises RuntimeError when this machine has no apt-get, and CalledProcessError."""
    missing = sorted({package for program, package in _PACKAGES.items() if not shutil.which(program)})
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise RuntimeError(f"no Docker engine answers, and {', '.join(missing)} cannot be installed without apt-get")
    run(["apt-get", "update", "--quiet"])
    run(["apt-get", "install", "--quiet", "--yes", "--no-install-recommends", *missing])


def install_compose(config: Path) -> None:
    """Makes Compose a plugin of the docker client with the folder `config`."""
    plugin = config / "cli-plugins" / _COMPOSE
    if plugin.exists():
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _download_compose(folder)
        (package,) = folder.glob("*.deb")
        run(["dpkg", "-x", package, folder / "files"])
        plugin.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "files" / "usr" / "libexec" / "docker" / "cli-plugins" / _COMPOSE, plugin)


def _download_compose(folder: Path) -> None:
    """Downloads with separate package lists, so that apt on this machine still knows one release alone."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    for number, source in enumerate(_sources()):
        text = source.read_text().replace(release, _RELEASE_WITH_COMPOSE)
        (folder / f"{number}{source.suffix}").write_text(text)
    (folder / "lists" / "partial").mkdir(parents=True)
    options = {"Dir::Etc::SourceList": "-", "Dir::Etc::SourceParts": folder, "Dir::State::Lists": folder / "lists"}
    options |= {"Dir::Cache": folder, "APT::Sandbox::User": "root"}
    given = [f"--option={name}={value}" for name, value in options.items()]
    run(["apt-get", *given, "update", "--quiet"])
    # apt-get downloads into the working directory.
    answer(["env", "--chdir", folder, "apt-get", *given, "download", _COMPOSE])


def _sources() -> list[Path]:
    apt = Path("/etc/apt")
    parts = [path for path in sorted((apt / "sources.list.d").iterdir()) if path.suffix in (".list", ".sources")]
    return [path for path in (apt / "sources.list", *parts) if path.is_file()]
