"""A TCP proxy that imitates a bad network on request, from any thread."""

from __future__ import annotations

import asyncio
import ctypes
import random
import socket
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

_CHUNK = 65536
_SO_ATTACH_FILTER = 26


def _deaf(end: asyncio.StreamWriter) -> None:
    """The kernel drops every packet that arrives for the socket, before it acknowledges it: by a socket filter of one
    instruction, `ret 0`. Its address is in the option, so it is copied before the call returns."""
    instruction = ctypes.create_string_buffer(b"\x06\0\0\0\0\0\0\0", 8)
    program = (ctypes.c_uint64 * 2)(1, ctypes.addressof(instruction))
    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))


class Proxy:
    """A proxy in front of the server of `target`, a URL; `url` is the same through the proxy.

    `cut_share` of the connections made from now on end after a few of `cut_within` bytes, in mid-message. `cut` counts
    those, `dropped` counts the ones that `drop` ended, and `silenced` those of `silence`.
    """

    def __init__(self, target: str, cut_within: int = 50_000, seed: int = 1) -> None:
        self._target = urlsplit(target)
        self._dice = random.Random(seed)
        self._cut_within = cut_within
        self.cut_share = 0.0
        self.dropped = self.cut = self.silenced = 0
        self._refusing = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._socket = socket.create_server(("127.0.0.1", 0))
        port = self._socket.getsockname()[1]
        self.url = urlunsplit(self._target._replace(netloc=f"127.0.0.1:{port}"))

    def __enter__(self) -> Proxy:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.refuse()
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def refuse(self) -> None:
        """Goes down: connections end, and new ones end at once."""
        self._refusing = True
        self.drop()

    def drop(self) -> None:
        """Ends every open connection."""
        self._do(self._drop())

    def stall(self) -> None:
        """Takes bytes and forwards none."""
        self._do(self._stall())

    def silence(self, *, acknowledge: bool = False) -> None:
        """Makes every open connection fall silent, as when the server's machine loses its power: nothing is forwarded,
        ended or, unless `acknowledge`, acknowledged any more. New connections work."""
        self._do(self._silence(acknowledge))

    def go_on(self) -> None:
        """Returns to normal; the held-back bytes arrive now."""
        self._refusing = False
        self._do(self._open())

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(30)

    async def _start(self) -> None:
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server = await asyncio.start_server(self._serve, sock=self._socket)

    async def _end(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self.dropped += len(self._writers) // 2
        self._writers.clear()

    async def _stall(self) -> None:
        self._flowing.clear()

    async def _silence(self, acknowledge: bool) -> None:
        self._flowing.clear()
        self._flowing = asyncio.Event()  # the open connections go on waiting for the old one
        self._flowing.set()
        for writer in () if acknowledge else self._writers:
            _deaf(writer)
        self.silenced += len(self._writers) // 2
        self._writers.clear()

    async def _open(self) -> None:
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, back}
        if self._refusing:  # after the request
            for end in ends:
                end.transport.abort()
            return
        self._writers |= ends
        cut = self._dice.random() < self.cut_share
        left = self._dice.randrange(self._cut_within) if cut else None
        pumps = [asyncio.ensure_future(self._pump(*pair, left)) for pair in ((reader, back), (there, writer))]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for end in ends:
            end.transport.abort() if cut else end.close()
        self._writers -= ends

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, left: int | None) -> None:
        """Forwards until the source ends, or until `left` bytes have passed, which is in mid-message."""
        flowing = self._flowing
        while data := await source.read(_CHUNK):
            await flowing.wait()
            sink.write(data if left is None else data[:left])
            await sink.drain()
            if left is not None and (left := left - len(data)) <= 0:
                self.cut += 1
                return


class Rewriting(Proxy):
    """A proxy that replaces some bytes on their way, in both directions: the server behind it looks like another."""

    def __init__(self, target: str, old: bytes, new: bytes) -> None:
        super().__init__(target)
        self._old, self._new = old, new

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, left: int | None) -> None:
        while data := await source.read(_CHUNK):
            sink.write(data.replace(self._old, self._new))
            await sink.drain()
