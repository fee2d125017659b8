"""The front's connections to replicas, kept for the next request.

lines = Lines()
async with aclosing(lines.answer(address, request)) as parts:
    async for part in parts: ...
lines.keep({address})
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Set
from typing import NamedTuple

from serving.ray.frames import Address, Frames, Head, frame, head_of
from serving.ray.sockets import client_tls, watch

CONNECT_SECONDS = 10.0
READ_BYTES = 1 << 16


class Lost(Exception):
    """The replica, or the way to it, was lost before the end of its answer."""


class Part(NamedTuple):
    """What of an answer has come since the last part. `head`: of the first one."""

    head: Head | None
    data: bytes
    is_last: bool


class _Line(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Lines:
    """Connections by address. One carries one request at a time."""

    def __init__(self) -> None:
        self._idle: dict[Address, list[_Line]] = {}

    def keep(self, addresses: Set[Address]) -> None:
        """Close the idle connections to all others."""
        for address in self._idle.keys() - addresses:
            for line in self._idle.pop(address):
                line.writer.transport.abort()

    async def answer(self, address: Address, request: bytes) -> AsyncGenerator[Part, None]:
        """The parts of the answer: all that has come, whenever some has. Raises Lost. Whoever
        closes the generator before the last part does not want the rest: the replica is told."""
        line = None
        head: Head | None = None
        is_whole = False
        try:
            line = await self._line(address)
            line.writer.write(frame(request))
            await line.writer.drain()
            frames, found = Frames(), []
            while not is_whole:
                data = await line.reader.read(READ_BYTES)
                if not data:
                    raise Lost("the replica closed the connection")
                found += frames.fed(data)
                if head is None and len(found) > 1:
                    head = first = head_of(found.pop(0).data)
                elif head is None or not found:
                    continue
                else:
                    first = None
                is_whole = found[-1].is_last
                if is_whole:
                    self._idle.setdefault(address, []).append(line)
                yield Part(first, b"".join(one.data for one in found), is_whole)
                found = []
        except (OSError, TimeoutError) as problem:
            raise Lost(str(problem)) from problem
        finally:
            if line is not None and not is_whole:
                line.writer.transport.abort()

    async def _line(self, address: Address) -> _Line:
        idle = self._idle.get(address, [])
        while idle:
            line = idle.pop()
            if not line.reader.at_eof():
                return line
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=client_tls()
            )
        watch(writer.transport)
        writer.write(address.token)
        return _Line(reader, writer)
