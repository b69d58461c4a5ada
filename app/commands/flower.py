"""`tinsmith flower`: Celery's dashboard of a stack."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from ipaddress import ip_address
from typing import NoReturn

from app.commands import connection
from app.errors import SetupError
from app.stack import child, ports
from app.stack.config import Options

_LOGIN = "FLOWER_BASIC_AUTH"
# kwargs has the model and the project.
COLUMNS = "name,kwargs,state,uuid,received,runtime,retries,worker"


def flower(options: Options, address: str, port: int) -> NoReturn:
    """Runs Flower in the place of this process.

    Raises SetupError when Flower is not installed, when no stack runs there, for an address that others reach if there
    is no login, for a login of another form, and when the port is not free.
    """
    if find_spec("flower") is None:
        raise SetupError('Flower is not installed; run `pip install "tinsmith[flower]"`')
    if not (_is_loopback(address) or os.environ.get(_LOGIN)):
        raise SetupError(
            f"Flower on {address} would show every call to everybody; set {_LOGIN}=user:password in the environment"
        )
    login = os.environ.get(_LOGIN)
    if login and not all(all(one.partition(":")[::2]) for one in login.split(",")):
        raise SetupError(f"{_LOGIN} must be user:password, or several of them with commas between them")
    environ = connection.environment(options)
    port = ports.free_port(address, port, "--address", "--port")
    options_of_flower = (f"--address={address}", f"--port={port}", f"--tasks-columns={COLUMNS}")
    command = [sys.executable, "-m", "workers.flower", *options_of_flower]
    os.execve(sys.executable, command, {**environ, **child.import_path(environ)})


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
