"""Renders chat templates in a child process that the kernel kills at a limit of CPU time.

    templates = TemplateProcess()
    templates.render("{{ messages[0].content }}", {"messages": [{"role": "user", "content": "x"}]})

A template is a downloaded program. A single operation of it, such as a product of long integers or
a sum of lists, may hold the GIL for minutes, so nothing inside the same process can stop it. The
child (crossover.models.text.template_sandbox) stays alive between renderings, which saves its
start. Requests to it are pickled, since this process is trusted; its answers are plain text.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from crossover.models.child_process import start_python
from crossover.models.errors import BadChat

CPU_SECONDS = 2.0  # limit of one rendering, compilation included, of the child's CPU time
MAX_TEMPLATE_CHARACTERS = 1 << 18  # published ones have less than 20,000
MAX_ANSWER_BYTES = 16 << 20
_ANSWER_SECONDS = 60.0  # on the clock, for a child that does not run
_PIECE_BYTES = 1 << 14
_LOCK_POLL_SECONDS = 0.001
# The kinds of answers: a prompt, or why there is none.
PROMPT, REFUSED, UNCOMPILABLE = b"p", b"r", b"u"
LENGTH_BYTES = 4  # of the number before each message, big-endian


class AsWritten(str):
    """JSON text that is rendered unchanged. `tojson` adds no quotes, and for a template that
    iterates over its keys it has none."""

    def items(self) -> tuple[()]:
        return ()


class BadTemplate(BadChat):
    """The template is too long, cannot be compiled, or was stopped at its time limit."""


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    connection: socket.socket


class TemplateProcess:
    """A child that renders templates, one at a time. It is started by the first rendering and
    started again after it was stopped. Thread-safe."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()  # held by the rendering that the child works on
        self._child: _Child | None = None  # the last one that was started
        self._received = bytearray()
        self._unread_answers = 0  # of renderings that were canceled
        self._end: Callable[[], object] = lambda: None

    @property
    def pid(self) -> int | None:
        """The process id of the child; None: it is not started yet."""
        return None if self._child is None else self._child.process.pid

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Render a template, and wait for it. Raises BadChat, BadTemplate."""
        request = _request_of(template, variables)
        with self._lock:
            child = self._running_child()
            connection = child.connection
            connection.settimeout(_ANSWER_SECONDS)
            try:
                connection.sendall(request)
                while (answer := self._next_answer()) is None:
                    self._receive(connection.recv(_PIECE_BYTES))
            except OSError as problem:
                raise self._why_it_ended(child.process, problem) from None
        return _prompt_of(answer)

    async def render_soon(self, template: str, variables: Mapping[str, Any]) -> str:
        """Render a template without blocking the event loop. Callers of one event loop take turns.
        Raises BadChat, BadTemplate."""
        import asyncio  # the child imports this module and has no event loop

        request = _request_of(template, variables)
        while not self._lock.acquire(blocking=False):  # another thread renders a long chat
            await asyncio.sleep(_LOCK_POLL_SECONDS)
        try:
            loop = asyncio.get_running_loop()
            child = self._running_child()
            connection = child.connection
            connection.setblocking(False)
            timer = loop.call_later(_ANSWER_SECONDS, self._end)
            is_sent = False
            try:
                await loop.sock_sendall(connection, request)
                is_sent = True
                while (answer := self._next_answer()) is None:
                    self._receive(await loop.sock_recv(connection, _PIECE_BYTES))
            except OSError as problem:
                raise self._why_it_ended(child.process, problem) from None
            except asyncio.CancelledError:
                if is_sent:
                    self._unread_answers += 1
                else:
                    self._end()
                raise
            finally:
                timer.cancel()
        finally:
            self._lock.release()
        return _prompt_of(answer)

    def _running_child(self) -> _Child:
        """Return the child, which is started if it does not run."""
        if self._child is not None and self._child.process.poll() is None:
            return self._child
        self._end()
        self._received.clear()
        self._unread_answers = 0
        connection, of_child = socket.socketpair()
        module = "crossover.models.text.template_sandbox"
        with of_child:
            process = start_python(
                "-m", module, str(self._cpu_seconds), stdin=of_child, stdout=subprocess.DEVNULL
            )
        self._child = child = _Child(process, connection)
        self._end = weakref.finalize(self, _end, child)
        return child

    def _receive(self, data: bytes) -> None:
        """Keep what the child sent. Raises OSError if it has ended, or sends too much."""
        self._received += data
        if not data or len(self._received) > 2 * MAX_ANSWER_BYTES:
            raise ConnectionResetError

    def _next_answer(self) -> bytes | None:
        """Return the child's answer to the current request; None: more bytes are needed."""
        received = self._received
        while len(received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "big")
            if len(received) < end:
                return None
            answer = bytes(received[LENGTH_BYTES:end])
            del received[:end]
            if self._unread_answers == 0:
                return answer
            self._unread_answers -= 1
        return None

    def _why_it_ended(self, process: subprocess.Popen[bytes], problem: OSError) -> BadChat:
        """End the child, and return the error for the rendering that it worked on."""
        if not isinstance(problem, TimeoutError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        self._end()
        status = process.returncode
        why = f"the process that renders it ended with status {status}"
        if status == -signal.SIGPROF:
            why = f"rendering takes more than {self._cpu_seconds:g} s"
        return BadTemplate(f"The model's chat template was stopped: {why}.")


def _request_of(template: str, variables: Mapping[str, Any]) -> bytes:
    """Return the message that asks for a rendering. Raises BadTemplate if the template is too
    long."""
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise BadTemplate(
            f"The model's chat template has {len(template)} characters; the maximum is "
            f"{MAX_TEMPLATE_CHARACTERS}."
        )
    data = pickle.dumps((template, dict(variables)))
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def _prompt_of(answer: bytes) -> str:
    """Return the prompt in an answer. Raises BadChat if it has none."""
    kind, text = answer[:1], answer[1:].decode(errors="replace")
    if kind == PROMPT:
        return text
    if kind == UNCOMPILABLE:
        raise BadTemplate(f"The model's chat template cannot be compiled: {text}")
    raise BadChat(f"The model's chat template refuses these messages: {text}")


def _end(child: _Child) -> None:
    child.connection.close()
    child.process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.process.wait(1.0)
