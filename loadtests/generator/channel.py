"""The pipe between the runner and a load generator: one JSON line per message, over a socket pair.

    with LoadGenerator(GeneratorProcess(log=log)) as generator:
        generator.tell(plan)
        for message in generator.told(): ...

A process killed within a message loses that message only.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from loadtests.errors import LevelInterrupted
from loadtests.generator.launcher import GeneratorProcess
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.messages import Ended, Failed, Order, Stop, Told

TICK_SECONDS = 0.1
_READ_BYTES = 1 << 18
Incoming = TypeVar("Incoming")

encode = msgspec.json.Encoder().encode


class Channel(Generic[Incoming]):
    """One end of the pipe. `incoming` is the union of messages that the other end sends."""

    def __init__(self, end: socket.socket, incoming: object) -> None:
        self._socket = end
        self._decode = msgspec.json.Decoder(incoming).decode
        self._unread = b""
        self._unsent = bytearray()
        self._is_sending = False

    def send(self, message: Order | Told) -> None:
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """Send an encoded message. Within gevent, another greenlet may be in the middle of one."""
        self._unsent += line + b"\n"
        if self._is_sending:
            return
        self._is_sending = True
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        finally:
            self._is_sending = False

    def receive(self, timeout_seconds: float | None = None) -> list[Incoming]:
        """Messages that have come; [] when none came in time. Raises EOFError after the last."""
        if not select.select([self._socket], [], [], timeout_seconds)[0]:
            return []
        try:
            data = self._socket.recv(_READ_BYTES)
        except ConnectionResetError:  # the other end died with bytes unread
            data = b""
        if not data:
            raise EOFError("the other end of the pipe is closed")
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [self._decode(line) for line in lines]

    def close(self) -> None:
        self._socket.close()


class LoadGenerator:
    """The runner's side of a load generator's process."""

    def __init__(self, process: GeneratorProcess) -> None:
        self.child = process.child
        self.channel: Channel[Told] = Channel(process.pipe, Told)
        self.listening = process.listening
        self._process = process
        self._is_busy = False  # with a level

    def told(self, tick_seconds: float = TICK_SECONDS) -> Iterator[Told | None]:
        """Its messages as they come, and None about every `tick_seconds`.

        Raises LevelInterrupted when it fails or its process ends.
        """
        ticked = time.monotonic()
        while True:
            try:
                messages = self.channel.receive(tick_seconds)
            except EOFError:
                raise self._ended_early() from None
            for message in messages:
                self._is_busy &= not isinstance(message, Ended | Failed)
                if isinstance(message, Failed):
                    raise LevelInterrupted(f"the load generator failed: {message.problem}")
                yield message
            if time.monotonic() - ticked >= tick_seconds:
                ticked = time.monotonic()
                yield None

    def tell(self, message: Order) -> None:
        """Raises LevelInterrupted when its process has ended before it had a plan."""
        self._is_busy |= isinstance(message, LoadPlan)
        try:
            self.channel.send(message)
        except (BrokenPipeError, ConnectionResetError):
            if isinstance(message, LoadPlan):
                raise self._ended_early() from None
            # else told() says how it ended, after all that it told

    def settle(self, timeout_seconds: float = 20.0) -> None:
        """Stop a level that counts for nothing any more, and hear it out, before the next."""
        until = time.monotonic() + timeout_seconds
        if self._is_busy:
            self.tell(Stop())
        with contextlib.suppress(LevelInterrupted):
            for _ in self.told() if self._is_busy else ():
                if not self._is_busy or time.monotonic() > until:
                    return

    def _ended_early(self) -> LevelInterrupted:
        self.child.wait(5)
        return LevelInterrupted(f"the load generator ended early ({self.child.how_it_ended()})")

    def close(self, timeout_seconds: float = 15.0) -> None:
        """Let it quit by itself."""
        self.channel.close()
        self.child.wait(timeout_seconds)

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()
