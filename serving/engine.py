"""The engine child: one backend, one scheduler, one socket to the parent.

Started by the supervisor as `python -m serving.engine` with its EngineConfig as JSON in CROSSOVER_ENGINE and the number of an
inherited socket in CROSSOVER_ENGINE_FD. A child of its own because a CUDA error aborts the process, an out-of-memory kill takes
the process, and the Python work of HTTP must not share a GIL with the step loop.

Says Loading while it loads, then Ready, then one Step message for each scheduler step. Ends with its parent.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import resource
import select
import signal
import socket
import sys
import threading
import time

import msgspec

from serving.backends.base import EngineConfig
from serving.messages import Alive, Cancel, Died, Frames, FromEngine, Loading, Ready, Step, Stop, Submit, decode_to_engine, frame

CONFIG_VARIABLE = "CROSSOVER_ENGINE"
SOCKET_VARIABLE = "CROSSOVER_ENGINE_FD"
ALIVE_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Runs the child to its end; the exit status is 0 only after a Stop."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    die_with_parent()
    config = msgspec.json.decode(os.environ[CONFIG_VARIABLE].encode(), type=EngineConfig)
    _prefer_for_oom_kill()
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    link = Link(socket.socket(fileno=int(os.environ[SOCKET_VARIABLE])))
    try:
        return _serve(config, link)
    except ParentGone:
        return 1
    except Exception as problem:
        link.send(Died(cause_of(problem, loading=not link.ready), f"{type(problem).__name__}: {problem}"))
        if not _is_expected(problem):
            raise
        print(f"engine: {problem}", file=sys.stderr)
        return 2


def _serve(config: EngineConfig, link: Link) -> int:
    started = time.perf_counter()
    from models.tokenizer import load_tokenizer
    from serving import grammar
    from serving.backends import backend_class
    from serving.scheduler import Scheduler

    link.send(Loading(None, "starting"))
    backend = backend_class(config.backend)(config, lambda what, fraction: link.send(Loading(fraction, what)))
    tokenizer = load_tokenizer(config.tokenizer_path or config.model_path)
    table = tokenizer.token_bytes()
    table += [b""] * max(0, backend.info.vocabulary - len(table))  # models pad their vocabulary
    grammars = grammar.Grammars(table, tokenizer.eos_ids)
    scheduler = Scheduler(backend, table, tokenizer.eos_ids, config, constrain=grammars.open)
    info = backend.info
    if not grammar.has_matcher():
        info = msgspec.structs.replace(info, capabilities=info.capabilities - grammar.CAPABILITIES)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    link.send(Ready(info, time.perf_counter() - started, rss_bytes(), peak_rss_bytes()))
    link.ready = True
    pulse = Pulse(link)
    draining = False
    while True:
        for message in link.receive(wait=not scheduler.busy and not draining):
            match message:
                case Submit():
                    refused = scheduler.add(message)
                    if refused is not None:
                        link.send(Step([refused], msgspec.structs.replace(scheduler.stats(), step_seconds=0.0)))  # no step was made
                case Cancel(id=sequence_id):
                    scheduler.cancel(sequence_id)
                case Stop(drain=drain):
                    draining = True
                    if not drain:
                        backend.close()
                        return 0
        if draining and not scheduler.busy:
            backend.close()
            return 0
        if scheduler.busy:
            pulse.step_started = time.monotonic()
            deltas = scheduler.step()
            pulse.step_started = None
            link.send(Step(deltas, scheduler.stats()))


class ParentGone(Exception):
    """The socket is closed: nobody is there to serve."""


class Link:
    """The socket to the parent. Sending is shared with the pulse thread; receiving is the loop's alone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(True)
        self._frames = Frames()
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self.ready = False

    def send(self, message: FromEngine) -> None:
        data = frame(message)
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError as problem:
            raise ParentGone from problem

    def receive(self, wait: bool) -> list[Submit | Cancel | Stop]:
        """All messages there are; with `wait`, at least one."""
        messages: list[Submit | Cancel | Stop] = []
        while self._poll.poll(None if wait and not messages else 0):
            try:
                data = self._socket.recv(1 << 20)
            except OSError as problem:
                raise ParentGone from problem
            if not data:
                raise ParentGone
            messages += [decode_to_engine(body) for body in self._frames.feed(data)]
        return messages


class Pulse:
    """Tells the parent once a second that a long step is still a step."""

    def __init__(self, link: Link) -> None:
        self.step_started: float | None = None
        self._link = link
        threading.Thread(target=self._beat, daemon=True, name="pulse").start()

    def _beat(self) -> None:
        while True:
            time.sleep(ALIVE_SECONDS)
            started = self.step_started
            if started is None:
                continue
            try:
                self._link.send(Alive(time.monotonic() - started))
            except ParentGone:
                return


def cause_of(problem: Exception, loading: bool) -> str:
    """The value of serving.placement.Cause that an exception stands for."""
    from serving.errors import BackendUnavailable, OutOfMemory

    if isinstance(problem, BackendUnavailable):
        return "backend_missing"
    if isinstance(problem, OutOfMemory | MemoryError):
        return "load_oom" if loading else "runtime_oom"
    return "load_failed" if loading else "engine_died"


def _is_expected(problem: Exception) -> bool:
    from models.errors import ModelError
    from serving.errors import ServingError

    return isinstance(problem, ServingError | ModelError)


def die_with_parent() -> None:
    """Ask the kernel (Linux) for SIGKILL when the parent ends, however it ends."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _prefer_for_oom_kill() -> None:
    """When memory runs out, the kernel shall take the engine, not the API process that can restart it."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("800")
    except OSError as problem:
        print(f"engine: oom_score_adj not set: {problem}", file=sys.stderr)


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    raise SystemExit(main())
