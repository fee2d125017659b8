"""One engine process from the parent's side: spawn it, speak serving.messages with it, notice its end.

Works on asyncio's loop and on uvloop: the socket is a transport of the loop; the process is waited for by a thread of its own, and another
one passes the child's output on to standard error while it keeps the last lines, which are the reason when a library aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from serving.backends.base import EngineConfig
from serving.messages import Frames, FromEngine, ToEngine, decode_from_engine, frame
from serving.placement import Cause
from serving.probe import python_path

CONFIG_VARIABLE = "CROSSOVER_ENGINE"
SOCKET_VARIABLE = "CROSSOVER_ENGINE_FD"
KEPT_LINES = 20
# Backends whose large allocations go on huge pages where the system grants them on request (transparent_hugepage = madvise, the usual
# default): the weights are read through fewer page tables. 135M on one core: llama_cpp up to 2 %, onnx at one stream 2 to 6 % (by hand),
# torch none.
HUGE_PAGES = frozenset({"llama_cpp", "onnx"})
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Child:
    """A running engine process. `on_message` gets each message, `on_exit` is called once, after the last message, on the loop."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        config: EngineConfig,
        on_message: Callable[[FromEngine], None],
        on_exit: Callable[[], None],
        on_output: Callable[[str], None] | None = None,
    ) -> None:
        self.pid = process.pid
        self.config = config
        self.returncode: int | None = None
        self.broken: str | None = None  # what was wrong with a message of the child's
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._process = process
        self._on_message = on_message
        self._on_exit = on_exit
        self._on_output = on_output
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._socket_closed = False
        self._exit_told = False
        self._output_ended = threading.Event()
        self._killed_by_us = False
        self._memory_kills_before = _memory_kills()

    @classmethod
    async def spawn(
        cls,
        config: EngineConfig,
        on_message: Callable[[FromEngine], None],
        on_exit: Callable[[], None],
        on_output: Callable[[str], None] | None = None,
    ) -> Child:
        """Start `python -m serving.engine` with this configuration. Raises OSError where no process can be started.

        `on_output` gets each line that the child prints, in a thread; None: they go to standard error.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "serving.engine"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    env=environment(config, theirs.fileno()),
                    start_new_session=True,  # Ctrl-C in the terminal is the parent's to handle
                )
            except OSError:
                ours.close()
                raise
        child = cls(process, config, on_message, on_exit, on_output)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: _Wire(child), sock=ours)
        child._transport = transport
        threading.Thread(target=child._pass_output_on, daemon=True, name=f"engine-output-{process.pid}").start()
        threading.Thread(target=child._wait, daemon=True, name=f"engine-wait-{process.pid}").start()
        return child

    @property
    def alive(self) -> bool:
        return self.returncode is None

    def send(self, message: ToEngine) -> None:
        """Hand a message to the socket; nothing happens once the child is gone (its end is told by `on_exit`)."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def kill(self) -> None:
        """SIGKILL, to the child and whatever it started."""
        if self.alive:
            self._killed_by_us = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    @property
    def killed_for_memory(self) -> bool:
        """True when it ended by a SIGKILL that was not ours while the kernel's count of out-of-memory kills rose."""
        kills = _memory_kills()
        rose = kills is not None and self._memory_kills_before is not None and kills > self._memory_kills_before
        return self.returncode == -signal.SIGKILL and not self._killed_by_us and rose

    def cpu_seconds(self) -> float | None:
        """User and system time that the child has used so far; None when it is gone."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS
        except (OSError, IndexError, ValueError):
            return None

    def exit_text(self) -> str:
        """How the process ended, with its last words where it left any."""
        if self.returncode is None:
            return "still running"
        how = f"ended by {_signal_name(-self.returncode)}" if self.returncode < 0 else f"exit status {self.returncode}"
        words = next((line for line in reversed(self.last_lines) if line.strip() and not line.startswith((" ", "Extension modules"))), "")
        return f"{how}: {words.strip()}" if words else how

    # The wire's side, on the loop.

    def _received(self, body: bytes) -> None:
        try:
            message = decode_from_engine(body)
        except (msgspec.DecodeError, ValueError) as problem:
            self._break(f"the engine sent what is no message: {problem}")
            return
        self._on_message(message)

    def _break(self, why: str) -> None:
        self.broken = why
        self.kill()

    def _connection_lost(self) -> None:
        self._socket_closed = True
        self._tell_exit()
        if self.alive:  # a child that closes its socket and stays is of no use to anyone
            self._loop.call_later(1.0, self.kill)

    def _process_ended(self, returncode: int) -> None:
        self.returncode = returncode
        # Data that the child wrote before it died may still be in the socket: its end, EOF, comes after them.
        self._loop.call_later(1.0, self._tell_exit, True)
        self._tell_exit()

    def _tell_exit(self, anyway: bool = False) -> None:
        if self._exit_told or self.returncode is None or not (self._socket_closed or anyway):
            return
        self._exit_told = True
        if self._transport is not None:
            self._transport.close()
        self._on_exit()

    # Threads.

    def _wait(self) -> None:
        returncode = self._process.wait()
        self._output_ended.wait(0.5)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
            self._loop.call_soon_threadsafe(self._process_ended, returncode)

    def _pass_output_on(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                text = line.decode(errors="replace").rstrip()
                self.last_lines.append(text)
                with contextlib.suppress(OSError, ValueError):  # nobody reads our standard error; the engine shall live on
                    if self._on_output is not None:
                        self._on_output(text)
                    else:
                        print(text, file=sys.stderr, flush=True)
        self._output_ended.set()


class _Wire(asyncio.Protocol):
    """Bytes of the socket -> messages of the child."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._child._received(body)
        except ValueError as problem:
            self._child._break(f"the engine broke the framing: {problem}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._child._connection_lost()


def environment(config: EngineConfig, socket_number: int) -> dict[str, str]:
    """The child's environment: the parent's, its configuration, and thread counts that match its cores."""
    threads = str(config.threads or len(config.cores) or len(os.sched_getaffinity(0)))
    variables = dict(
        os.environ,
        PYTHONPATH=python_path(),
        PYTHONSAFEPATH="1",  # a folder named `models` or `serving` where the user stands must not be imported
        PYTHONUNBUFFERED="1",
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        OPENBLAS_NUM_THREADS="1",  # numpy samples on one thread beside the engine's own
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",  # weights are resolved before; an engine opens no connection
    )
    variables |= allocator(config.backend)
    variables[CONFIG_VARIABLE] = json.dumps(msgspec.to_builtins(config))
    variables[SOCKET_VARIABLE] = str(socket_number)
    if config.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
        variables["HIP_VISIBLE_DEVICES"] = ""
    return variables


def allocator(backend: str) -> dict[str, str]:
    """What the C library's allocator is told (see HUGE_PAGES), in the environment variable that it reads before a program starts. What the
    user set comes first: GLIBC_TUNABLES=glibc.malloc.hugetlb=0 means none. C libraries other than glibc ignore it."""
    said = os.environ.get(_TUNABLES, "")
    if backend not in HUGE_PAGES or _HUGE_PAGES in said:
        return {}
    return {_TUNABLES: ":".join(filter(None, (said, f"{_HUGE_PAGES}=1")))}


def cause_of_exit(returncode: int | None, ready: bool, out_of_memory_killed: bool = False) -> Cause:
    """The cause that an exit without a last word stands for."""
    if out_of_memory_killed:
        return Cause.runtime_oom if ready else Cause.load_oom
    return Cause.engine_died if ready or (returncode is not None and returncode < 0) else Cause.load_failed


def _memory_kills() -> int | None:
    """How many processes the kernel has killed for want of memory since boot; None where it does not count."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    except OSError:
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
