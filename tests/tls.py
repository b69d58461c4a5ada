"""TLS in front of servers that have none, with a certificate that is good for 127.0.0.1 alone."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgI+jaksHWzZucYyeg
OR2p5akh7x1T75I2NNPC4+0PllChRANCAAQf+BZiD0VUJAR6NULnuuLkxp4q3Q2G
fFsWTCU9cz1GUXxilWq7UVJT4uvw4w968j80SJcoTx7y+nw99lo/tdTP
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBPTCB46ADAgECAgEBMAoGCCqGSM49BAMCMBQxEjAQBgNVBAMMCTEyNy4wLjAu
MTAgFw0wMDAxMDEwMDAwMDBaGA8yMTIwMDEwMTAwMDAwMFowFDESMBAGA1UEAwwJ
MTI3LjAuMC4xMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEH/gWYg9FVCQEejVC
57ri5MaeKt0NhnxbFkwlPXM9RlF8YpVqu1FSU+Lr8OMPevI/NEiXKE8e8vp8PfZa
P7XUz6MkMCIwDwYDVR0RBAgwBocEfwAAATAPBgNVHRMBAf8EBTADAQH/MAoGCCqG
SM49BAMCA0kAMEYCIQDLyzCdzGgNBw1kxF5q0atULYyzlP3KfDdpskTeeH5QjgIh
AKDkcSbHuagMRb3VE/oIdG5BzMfXVoZxPkXqexYQH0t8
-----END CERTIFICATE-----
"""
_HANDSHAKE = b"\x16"


def write_certificate(folder: Path) -> Path:
    """The file with the certificate and its key; it is also the authority that a client has to trust."""
    file = folder / "certificate.pem"
    file.write_text(_CERTIFICATE)
    return file


@contextmanager
def tls_in_front(target: int, certificate: Path) -> Iterator[tuple[int, list[bool]]]:
    """Yields a port of 127.0.0.1 that leads to the port `target`, and a list with an item for each connection: True if
    it came with TLS. Connections without TLS pass as they are, such as those between the servers themselves."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    seen: list[bool] = []

    def serve(plain: socket.socket) -> None:
        with suppress(OSError), plain:
            is_tls = plain.recv(1, socket.MSG_PEEK) == _HANDSHAKE
            seen.append(is_tls)
            near = context.wrap_socket(plain, server_side=True) if is_tls else plain
            with near, socket.create_connection(("127.0.0.1", target)) as far:
                back = threading.Thread(target=_copy, args=(far, near), daemon=True)
                back.start()
                _copy(near, far)
                back.join()

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1], seen
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
