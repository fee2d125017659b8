"""One engine process: start it, speak serving.engine.ipc_messages with it, notice its end, say why.

    engine = EngineProcess(0, config)
    await engine.start(on_message, on_exit)       # on_exit comes once, after the last message
    engine.send(Submit(...))

Works on asyncio's loop and on uvloop. One thread waits for the process; another passes its output
on and keeps the last lines, which are the reason when a library aborts.
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
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from models.isolated import start_python
from serving.backends.backend_interface import EngineConfig
from serving.backends.backend_table import spec_of
from serving.engine.ipc_messages import (
    Died,
    Frames,
    FromEngine,
    Ready,
    Step,
    ToEngine,
    decode_from_engine,
    frame,
)
from serving.errors import Cause
from serving.hardware.gpus import VULKAN
from serving.supervisor.hang_detection import HangWatch
from serving.supervisor.restart_policy import RecoveryLimits

CONFIG_VARIABLE = "CROSSOVER_ENGINE"
SOCKET_VARIABLE = "CROSSOVER_ENGINE_FD"
_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"
# Of a thread of OpenMP that waits for one without a core, before it leaves its own to it; 300,000
# by default. Two threads, two cores and other work on both (load 7): 9 tokens/s, and 12 with this.
SHORT_SPINS = "1000"


def environment(config: EngineConfig, socket_number: int) -> dict[str, str]:
    """Variables of the engine beside ours: its configuration, thread counts, the allocator."""
    threads = str(config.threads or len(config.cores) or len(os.sched_getaffinity(0)))
    variables = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": "1",  # numpy samples on one thread beside the engine's own
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # weights are resolved before; an engine opens no connection
        CONFIG_VARIABLE: json.dumps(msgspec.to_builtins(config)),
        SOCKET_VARIABLE: str(socket_number),
    } | allocator(config.backend)
    variables |= visible_devices(config)
    if config.nice:
        variables["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", SHORT_SPINS)
    return variables


def visible_devices(config: EngineConfig) -> dict[str, str]:
    """Which GPUs the engine sees: none on the CPU, else the one that was placed on, by its UUID.

    Drivers and runtimes number GPUs differently. HIP takes an empty list as none at all, and -1 as
    no GPU, and counts within ROCm's list: an inherited number may mean none of it. Of Vulkan's
    devices, llama.cpp is told one when it loads.
    """
    if config.device == "cpu":
        nobody = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "-1")
        return nobody | {"GGML_VK_VISIBLE_DEVICES": ""}
    if not config.device_id or config.device_vendor == VULKAN:
        return {}
    if config.device_vendor == "amd":
        return {"ROCR_VISIBLE_DEVICES": config.device_id, "HIP_VISIBLE_DEVICES": "0"}
    return {"CUDA_VISIBLE_DEVICES": config.device_id}


def allocator(backend: str) -> dict[str, str]:
    """What glibc's allocator is told (huge_pages in serving.backends); GLIBC_TUNABLES come first.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=0 turns huge pages off.
    """
    given = os.environ.get(_TUNABLES, "")
    if not spec_of(backend).huge_pages or _HUGE_PAGES in given:
        return {}
    return {_TUNABLES: ":".join(filter(None, (given, f"{_HUGE_PAGES}=1")))}


KEPT_LINES = 20
# From SIGKILL to giving up: a process in the driver (state D) does not end (pytorch issue 24081).
STUCK_AFTER_SECONDS = 10.0


class EngineProcess:
    """`place`: index of its configuration in the supervisor's list. Times are time.monotonic().

    `on_output` gets each line that the process prints, in a thread; None: standard error.
    """

    def __init__(
        self, place: int, config: EngineConfig, on_output: Callable[[str], None] | None = None
    ) -> None:
        self.place = place
        self.config = config
        self.pid: int | None = None
        self.returncode: int | None = None
        self.ready: Ready | None = None
        self.ready_at: float | None = None
        self.asked_to_end = False
        self.killed_for: str | None = None  # why it was given up as hung
        self.is_stuck = False  # in the driver: SIGKILL has not ended it
        self.sequences: set[int] = set()
        self.started_at = time.monotonic()
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._watch = HangWatch()
        self._died: Died | None = None  # its last word
        self._broken: str | None = None  # what was wrong with a message
        self._on_output = on_output
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._socket_closed = False
        self._exit_told = False
        self._output_ended = threading.Event()
        self._killed_by_us = False
        self._memory_kills_before = _memory_kills()

    async def start(
        self,
        on_message: Callable[[EngineProcess, FromEngine], None],
        on_exit: Callable[[EngineProcess], None],
    ) -> None:
        """Start `python -m serving.engine.engine_loop`. Both functions are called on the loop."""
        self._on_message = on_message
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        ours: socket.socket | None = None
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                process = start_python(
                    *("-m", "serving.engine.engine_loop"),
                    environment=environment(self.config, theirs.fileno()),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                )
        except OSError as problem:  # no descriptors, no memory
            if ours is not None:
                ours.close()
            self._died = Died(Cause.load_failed, f"no process can be started: {problem}")
            on_exit(self)
            return
        self._process = process
        self.pid = process.pid
        ours.setblocking(False)
        transport, _ = await self._loop.create_unix_connection(lambda: _Wire(self), sock=ours)
        self._transport = transport
        for work in (self._pass_output_on, self._wait):
            threading.Thread(target=work, daemon=True, name=f"engine-{process.pid}").start()
        if self.asked_to_end:  # meanwhile
            self.kill()

    @property
    def label(self) -> str:
        return label(self.config)

    @property
    def alive(self) -> bool:
        return self.pid is not None and self.returncode is None

    def send(self, message: ToEngine) -> None:
        """Write a message to the socket; dropped once the process is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def kill(self) -> None:
        """SIGKILL, to the process and whatever it started."""
        if self.alive and self.pid is not None:
            self._killed_by_us = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_later(STUCK_AFTER_SECONDS, self._leave)

    def _leave(self) -> None:
        """Count a process as ended that SIGKILL does not end; whoever waits goes on without it."""
        if self.returncode is not None or self._exit_told:
            return
        self.is_stuck = True
        self._exit_told = True
        if self._transport is not None:
            self._transport.close()
        self._on_exit(self)

    def took(self, sequence: int) -> None:
        """A sequence was given to it: from now on it has to step."""
        if not self.sequences:
            self._watch.took_work()
        self.sequences.add(sequence)

    def trouble(self, limits: RecoveryLimits) -> str | None:
        """Why to give up a running process (serving.supervisor.hang_detection)."""
        if self.killed_for is not None or not self.alive or self.pid is None:
            return None
        device, count = self.config.device, len(self.sequences)
        return self._watch.trouble(self.pid, self.ready, count, limits, device)

    def give_up(self, trouble: str) -> None:
        self.killed_for = trouble
        self.kill()

    # Its end.

    def why(self) -> tuple[Cause, str]:
        """The cause of an unasked-for end: hung, its last word, or its exit status."""
        if self.is_stuck:
            why = self.killed_for or "it was to end"
            text = f"{why}; it is stuck in the driver, and SIGKILL has not ended it"
            return Cause.health_timeout, text
        if self.killed_for is not None:
            return Cause.health_timeout, self.killed_for
        if self._died is not None:
            try:
                return Cause(self._died.cause), self._died.message
            except ValueError:
                return Cause.engine_died, f"{self._died.cause}: {self._died.message}"
        if self._broken is not None:
            return Cause.engine_died, self._broken
        return self._cause_of_exit(), self._exit_text()

    def _cause_of_exit(self) -> Cause:
        was_ready = self.ready is not None
        if self._killed_for_memory() or _says_memory(self.last_lines):
            return Cause.runtime_oom if was_ready else Cause.load_oom
        by_signal = self.returncode is not None and self.returncode < 0
        return Cause.engine_died if was_ready or by_signal else Cause.load_failed

    def _killed_for_memory(self) -> bool:
        """A SIGKILL that was not ours, while the kernel's count of out-of-memory kills rose."""
        if self.returncode != -signal.SIGKILL or self._killed_by_us:
            return False
        before, now = self._memory_kills_before, _memory_kills()
        return before is not None and now is not None and now > before

    def _exit_text(self) -> str:
        """How the process ended, with its last words where it left any."""
        if self.returncode is None:
            return "still running"
        how = f"exit status {self.returncode}"
        if self.returncode < 0:
            how = f"ended by {_signal_name(-self.returncode)}"
        told = [line.strip() for line in self.last_lines if not _is_trace(line)]
        about_memory = [line for line in told if _says_memory([line])]
        last = (about_memory or told)[-1:]
        return f"{how}: {last[0]}" if last else how

    # The wire's side, on the loop.

    def received(self, body: bytes) -> None:
        try:
            message = decode_from_engine(body)
        except (msgspec.DecodeError, ValueError) as problem:
            self.broke(f"the engine sent what is no message: {problem}")
            return
        self._watch.heard()
        match message:
            case Step():
                self._watch.stepped(message.stats)
            case Ready():
                self.ready = message
                self.ready_at = time.monotonic()
            case Died():
                self._died = message
        self._on_message(self, message)

    def broke(self, why: str) -> None:
        """What it sends makes no sense: end it."""
        self._broken = why
        self.kill()

    def connection_lost(self) -> None:
        self._socket_closed = True
        self._tell_exit()
        if self.alive:  # a process that closes its socket and stays is of no use
            self._loop.call_later(1.0, self.kill)

    def _process_ended(self) -> None:
        assert self._process is not None
        self.returncode = self._process.wait()
        # Data written before the death may still be in the socket: its EOF comes after them.
        self._loop.call_later(1.0, self._tell_exit, True)
        self._tell_exit()

    def _tell_exit(self, anyway: bool = False) -> None:
        if self._exit_told or self.returncode is None or not (self._socket_closed or anyway):
            return
        self._exit_told = True
        if self._transport is not None:
            self._transport.close()
        self._on_exit(self)

    # Threads.

    def _wait(self) -> None:
        assert self._process is not None
        # It stays a zombie until the loop knows: nobody else gets its number, which `kill` kills.
        try:
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # it is not ours to wait for
            self._process.wait()
        self._output_ended.wait(0.5)
        try:
            self._loop.call_soon_threadsafe(self._process_ended)
        except RuntimeError:  # the loop is closed: nobody wants to know
            self._process.wait()

    def _pass_output_on(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                text = line.decode(errors="replace").rstrip()
                self.last_lines.append(text)
                with contextlib.suppress(OSError, ValueError):  # nobody reads our standard error
                    if self._on_output is not None:
                        self._on_output(text)
                    else:
                        print(text, file=sys.stderr, flush=True)
        self._output_ended.set()


class _Wire(asyncio.Protocol):
    """Bytes of the socket -> messages of the engine."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._engine.received(body)
        except ValueError as problem:
            self._engine.broke(f"the engine broke the framing: {problem}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.connection_lost()


def label(config: EngineConfig) -> str:
    """Name of an engine in headers, logs and metrics: "llama_cpp/cpu"."""
    return f"{config.backend}/{config.device}"


def _is_trace(line: str) -> bool:
    """Lines of faulthandler, which say where and not why."""
    return not line.strip() or line.startswith(
        (" ", "Extension modules", "Current thread 0x", "Thread 0x", "Fatal Python error: Aborted")
    )


def _says_memory(lines: Iterable[str]) -> bool:
    """Whether a library said before it ended the process that memory ran out."""
    words = ("out of memory", "cudaMalloc failed", "ErrorOutOfDeviceMemory", "bad_alloc")
    return any(word in line for line in lines for word in words)


def _memory_kills() -> int | None:
    """The kernel's out-of-memory kills since boot; None: it does not count them."""
    try:
        with open("/proc/vmstat") as file:
            return next(
                (int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None
            )
    except OSError:
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
