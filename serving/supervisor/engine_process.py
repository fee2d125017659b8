"""One engine process: starts it, exchanges messages with it, and reports why it ended.

    engine = EngineProcess(0, config)
    await engine.start(on_step, on_message, on_exit)    # on_exit comes once, after all messages
    engine.send(Submit(...))

A thread forwards its output, keeps the last lines (the reason if a library aborts) and waits for
its end. An engine that hangs is detected by its silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from crossover.models.child_process import start_python
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.backends.backend_table import spec_of
from crossover.serving.engine import ipc_messages as ipc
from crossover.serving.errors import Cause
from crossover.serving.hardware.numa import running_on
from crossover.serving.supervisor.admission import Pace
from crossover.serving.supervisor.restart_policy import (
    LOAD_SILENCE_SECONDS,
    MAX_STEP_SLOWDOWN,
    MAX_STEP_TIMEOUTS,
)

# How often an OpenMP thread that waits for another one spins before it yields its core; the default
# is 300,000. With two threads on two cores and other work (load 7), the engine generates 9 tokens/s
# by default and 12 with 1000; beside two busy processes, 6.6 with 1000 and 4.2 with 100.
SHORT_SPINS = "1000"
# Beside another engine on the same cores: with 1000, llama.cpp (135M and 360M, Q4_0) generates 17.9
# and 11.9 tokens/s, with this 28.6 and 17.3; one of them by itself is about a tenth slower.
SHORTEST_SPINS = "100"
KEPT_LINES = 20  # of the process's output
# Seconds after which a process that was sent SIGKILL, or said that it dies, is given up: a process
# that hangs in the driver (state D) does not end (pytorch issue 24081).
STUCK_AFTER_SECONDS = 10.0
CLOSING_SECONDS = 1.0  # between the ends of the socket and of the process, whichever comes first
# Beginnings of the lines of faulthandler, which show where a process died but not why.
_TRACE = (" ", "Extension modules", "Current thread 0x", "Thread 0x", "Fatal Python error: Aborted")
# Messages of libraries before they end the process because memory ran out.
_OUT_OF_MEMORY = ("out of memory", "cudaMalloc failed", "ErrorOutOfDeviceMemory", "bad_alloc")


def environment(config: EngineConfig, descriptors: Mapping[str, int]) -> dict[str, str]:
    """Return the engine's additional environment variables: configuration, threads, allocator, and
    the numbers of inherited descriptors by the names of their variables."""
    threads = str(config.threads or len(config.cores) or len(os.sched_getaffinity(0)))
    variables = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": "1",  # numpy samples on one thread beside the engine's own
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # its weights are on disk, so an engine opens no connection
        ipc.CONFIG_VARIABLE: json.dumps(msgspec.to_builtins(config)),
    }
    variables |= {name: str(number) for name, number in descriptors.items()}
    if config.nice or config.shares_cores:
        spins = SHORTEST_SPINS if config.shares_cores else SHORT_SPINS
        variables["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", spins)
    return variables | allocator(config.backend) | _visible_devices(config)


def _visible_devices(config: EngineConfig) -> dict[str, str]:
    """Return the variables that select the GPUs that the engine sees: none for an engine on the
    CPU, otherwise the chosen one, or any if the driver does not report its UUID."""
    if config.device == "cpu":
        return {
            "CUDA_VISIBLE_DEVICES": "-1",
            "HIP_VISIBLE_DEVICES": "-1",  # an empty list would mean all GPUs
            "GGML_VK_VISIBLE_DEVICES": "",
        }
    return {"CUDA_VISIBLE_DEVICES": config.device_id} if config.device_id else {}


def allocator(backend: str) -> dict[str, str]:
    """Return the variables that set up glibc's allocator: huge pages, if they make the backend
    faster and the user has not set GLIBC_TUNABLES."""
    if not spec_of(backend).huge_pages or "GLIBC_TUNABLES" in os.environ:
        return {}
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class EngineProcess(asyncio.Protocol):
    """One engine process. Times are by time.monotonic().

    `index`: of its configuration in the supervisor's list. `on_output`: called in a thread with
    each line that the process prints.
    """

    def __init__(
        self, index: int, config: EngineConfig, on_output: Callable[[str], None] = print
    ) -> None:
        self.index = index
        self.config = config
        self.label = label(config)
        self.number: int | None = None  # 1.. of several that serve side by side; None: the only one
        self.pid: int | None = None
        self.returncode: int | None = None
        self.ready: ipc.Ready | None = None
        self.ready_at: float | None = None
        self.stop_requested = False  # its end is intended
        self.killed = False
        self.pace = Pace()  # the speed of its steps
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.started_at = time.monotonic()
        self._message_at = self.started_at  # when its last message came
        self._step_at = self.started_at  # when its last step ended, or it got work after none
        # The sequences that it runs, each with the number of bytes that were sent before it.
        self._sequences: dict[int, int] = {}
        self._sent_bytes = 0
        self._received_bytes = 0  # which it has read of them; known after its end
        self._received: int | None = None  # the eventfd in which it counts them
        self._frames = ipc.Frames()
        self._cause: tuple[Cause, str] | None = None  # of its end, if known already
        self._on_output = on_output
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._socket_closed = False
        self._exit_reported = False

    async def start(
        self,
        on_step: Callable[[EngineProcess, ipc.Step], None],
        on_message: Callable[[EngineProcess, ipc.Loading | ipc.Ready], None],
        on_exit: Callable[[EngineProcess], None],
    ) -> None:
        """Start `python -m crossover.serving.engine.engine_loop`. The functions are called on the
        event loop: `on_step` after each step, `on_message` with the other messages, `on_exit` once,
        after all messages. If the start fails, `on_exit` is called before this returns.
        """
        self._on_step = on_step
        self._on_message = on_message
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        try:
            own_end, engine_end = socket.socketpair()
            with engine_end:
                self._received = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                descriptors = {
                    ipc.SOCKET_VARIABLE: engine_end.fileno(),
                    ipc.RECEIVED_VARIABLE: self._received,
                }
                with running_on(self.config.cores):
                    self._process = start_python(
                        "-m",
                        "crossover.serving.engine.engine_loop",
                        environment=environment(self.config, descriptors),
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        pass_fds=tuple(descriptors.values()),
                    )
            own_end.setblocking(False)
            self._transport, _ = await self._loop.create_unix_connection(lambda: self, sock=own_end)
            name = f"engine-{self._process.pid}"
            threading.Thread(target=self._forward_output, daemon=True, name=name).start()
            self.pid = self._process.pid
        except (OSError, RuntimeError) as problem:  # no descriptors, no memory, no thread
            if self._process is not None:
                self._process.kill()
                self._process.communicate()
            self._cause = Cause.load_failed, f"no process can be started: {problem}"
            self._report_exit()
            return
        if self.stop_requested:  # while it was being started
            self.kill()

    @property
    def name(self) -> str:
        """Return its label, with its number if it has one: "llama_cpp/cpu #2"."""
        return self.label if self.number is None else f"{self.label} #{self.number}"

    @property
    def alive(self) -> bool:
        return self.pid is not None and self.returncode is None

    def send(self, message: ipc.ToEngine) -> None:
        """Write a message to the socket; dropped once the process is gone."""
        if isinstance(message, ipc.Submit):
            if not self._sequences:  # it was idle, and the time of its next step begins now
                self._step_at = time.monotonic()
            self._sequences[message.id] = self._sent_bytes
        if self._transport is not None and not self._transport.is_closing():
            frame = ipc.frame(message)
            self._transport.write(frame)
            self._sent_bytes += len(frame)

    @property
    def free_slots(self) -> int:
        """Return how many more sequences it can run at once; 0 while it is not ready."""
        if self.ready is None:
            return 0
        return self.ready.info.settings.slots - len(self._sequences)

    @property
    def in_flight(self) -> int:
        """Return the number of its sequences."""
        return len(self._sequences)

    def sequence_ended(self, sequence: int) -> None:
        """Note that the engine no longer runs a sequence."""
        self._sequences.pop(sequence, None)

    def has_received(self, sequence: int) -> bool:
        """Return whether this engine, which has ended, had read anything of one of its sequences,
        so that the sequence may be what ended it."""
        return self._received_bytes > self._sequences[sequence]

    def kill(self) -> None:
        """Send SIGKILL to the process and everything it started."""
        self.killed = True
        if self.alive and self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_later(STUCK_AFTER_SECONDS, self._abandon)

    def _abandon(self) -> None:
        """Treat the process as ended if SIGKILL did not end it, so that nobody waits for it."""
        if self.returncode is None:
            why = self._cause[1] if self._cause is not None else "it was asked to end"
            text = f"{why}; it hangs in the driver, and SIGKILL did not end it"
            self._cause = Cause.health_timeout, text
            self._report_exit()

    def give_up(self, cause: Cause, why: str) -> None:
        """Kill a process that can no longer serve."""
        self._cause = self._cause or (cause, why)
        self.kill()

    def end_if_hung(self, timeout_seconds: float, load_seconds: float | None = None) -> None:
        """Kill a process that is silent while it loads, or whose step takes too long.

        `load_seconds`: its maximum silence while it loads; None: that of its device.
        """
        if self._cause is not None or not self.alive:
            return
        now, device = time.monotonic(), self.config.device
        if self.ready is None:
            silent_seconds = now - self._message_at
            of_device = LOAD_SILENCE_SECONDS[device]
            if silent_seconds > min(of_device, load_seconds or of_device):
                why = f"no message from the loading engine for {silent_seconds:.0f} s"
                self.give_up(Cause.health_timeout, why)
            return
        count = len(self._sequences)
        step_seconds = now - self._step_at
        max_seconds = MAX_STEP_TIMEOUTS[device] * timeout_seconds
        pace = self.pace.prompt_tokens_per_second
        if pace is not None:
            largest_step_seconds = self.ready.info.settings.step_tokens / pace
            at_pace = MAX_STEP_SLOWDOWN * largest_step_seconds
            max_seconds = min(max_seconds, max(timeout_seconds, at_pace))
        if count and step_seconds > max_seconds:
            why = f"no step finished for {step_seconds:.1f} s with {count} sequences in flight"
            self.give_up(Cause.health_timeout, why)

    # Its end.

    @property
    def ended_as_requested(self) -> bool:
        """Whether it ended because it was asked to, and not by an error that came first."""
        ended_normally = self.killed or self.returncode == 0
        return self.stop_requested and ended_normally and self._cause is None

    def why(self) -> tuple[Cause, str]:
        """Return why it ended unexpectedly: why it was killed, its last message, or how it exited
        and the last line that explains it."""
        if self._cause is not None:
            return self._cause
        status = self.returncode
        assert status is not None
        how = f"exit status {status}"
        if status < 0:
            how = f"killed by signal {-status} ({signal.Signals(-status).name})"
        messages = [
            line.strip() for line in self.last_lines if line.strip() and not line.startswith(_TRACE)
        ]
        about_memory = [line for line in messages if any(words in line for words in _OUT_OF_MEMORY)]
        if messages:
            how = f"{how}: {(about_memory or messages)[-1]}"
        elif status == -signal.SIGKILL:
            how = f"{how}; unless you did this, the kernel may have run out of memory"
        if about_memory:
            return Cause.runtime_oom if self.ready is not None else Cause.load_oom, how
        was_killed_or_ready = status < 0 or self.ready is not None
        return Cause.engine_died if was_killed_or_ready else Cause.load_failed, how

    # Its socket, on the loop.

    def data_received(self, data: bytes) -> None:
        self._message_at = time.monotonic()
        for body in self._frames.feed(data):
            message = ipc.decode_from_engine(body)
            if isinstance(message, ipc.Step):
                self._step_at, stats = self._message_at, message.stats
                self.pace.learn(
                    stats.decode_rows,
                    stats.prefill_tokens,
                    stats.step_seconds,
                    is_full=self.free_slots <= 0,
                )
                self._on_step(self, message)
            elif isinstance(message, ipc.Died):
                self._cause = message.cause, message.message
                # It ends by itself now, unless it hangs.
                self._loop.call_later(STUCK_AFTER_SECONDS, self.kill)
            else:
                if isinstance(message, ipc.Ready):
                    self.ready = message
                    self.ready_at = self._message_at
                self._on_message(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._socket_closed = True
        if self.returncode is not None:
            self._report_exit()
        else:  # a process that closes its socket but does not end cannot serve
            self._loop.call_later(CLOSING_SECONDS, self.kill)

    def _process_ended(self) -> None:
        """Handle the end of the process, on the event loop."""
        assert self._process is not None
        self.returncode = self._process.wait()
        if self._socket_closed:
            self._report_exit()
        else:  # its last messages may still be in the socket; EOF follows them
            self._loop.call_later(CLOSING_SECONDS, self._report_exit)

    def _report_exit(self) -> None:
        """Call `on_exit`, once."""
        if not self._exit_reported:
            self._exit_reported = True
            if self._transport is not None:
                self._transport.close()
            if self._received is not None:
                with contextlib.suppress(BlockingIOError):  # it has read nothing
                    self._received_bytes = os.eventfd_read(self._received)
                os.close(self._received)
            self._on_exit(self)

    def _forward_output(self) -> None:
        """Forward its output, then wait for its end. Runs in a thread."""
        assert self._process is not None and self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                text = line.decode(errors="replace").rstrip()
                self.last_lines.append(text)
                with contextlib.suppress(OSError, ValueError):  # standard error may be closed
                    self._on_output(text)
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop may be closed
            self._loop.call_soon_threadsafe(self._process_ended)


def label(config: EngineConfig) -> str:
    """Return the name of an engine in headers, logs and metrics: "llama_cpp/cpu"."""
    return f"{config.backend}/{config.device}"
