"""A clock of the state server and the broker that can be set forward while they run."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.cpp")


class Clock:
    """Both servers' real-time clock. Its files lie in `folder`; g++ builds the library that the servers preload."""

    def __init__(self, folder: Path) -> None:
        self._file, self._library = folder / "clock", folder / "clock.so"
        self._write(0)
        command = ["g++", "-O2", "-shared", "-fPIC", "-o", self._library, _SOURCE]
        subprocess.run(command, check=True)

    @property
    def wrapper(self) -> tuple[str, ...]:
        """The command that starts a stack under this clock."""
        return ("env", f"LD_PRELOAD={self._library}", f"TINSMITH_SOAK_CLOCK={self._file}")

    @property
    def ahead_s(self) -> int:
        """Seconds by which the clock is ahead of the machine's."""
        return int.from_bytes(self._file.read_bytes(), "little")

    def jump(self, seconds: int) -> None:
        """Sets the clock forward. Only one thread may do so."""
        self._write(self.ahead_s + seconds)

    def _write(self, seconds: int) -> None:
        """Writes in place: the servers have the file mapped."""
        with self._file.open("r+b" if self._file.exists() else "xb") as file:
            file.write(seconds.to_bytes(8, "little"))
