"""The engine process: one backend, one scheduler, one socket to the parent.

Started as `python -m crossover.serving.engine.engine_loop` with an EngineConfig as JSON in
CROSSOVER_ENGINE and the numbers of an inherited socket and an eventfd in the variables of
ipc_messages.py. The engine is a process of its own, because a CUDA error or the kernel's OOM killer
ends a whole process, and because HTTP must not share a GIL with the step loop. It sends Loading
while it loads, then Ready, then one Step for each scheduler step. It ends with its parent.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from crossover.models.child_process import end_with_parent
from crossover.models.errors import ModelError
from crossover.models.text.answer_marks import with_marks
from crossover.models.text.tokenizer import load_tokenizer
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.backends.backend_table import backend_class
from crossover.serving.engine import ipc_messages as ipc
from crossover.serving.engine.scheduler import Scheduler, failed_delta
from crossover.serving.errors import (
    BackendUnavailable,
    Cause,
    OutOfMemory,
    ServingError,
    Unsupported,
)
from crossover.serving.hardware.machine_facts import (
    lower_priority,
    peak_resident_bytes,
    resident_bytes,
)
from crossover.serving.hardware.numa import (
    MISPLACED_ADVICE,
    memory_share_on,
    misplaced_words,
    run_on,
)
from crossover.serving.sampling.grammar import Grammars, Matcher, grammar_text

# Python's switch interval between threads. With the default of 5 ms, a step waited up to 50 ms for
# the grammar compiler.
SWITCH_SECONDS = 0.0002
# The compiler's niceness. On two cores, both the engine's, the p99 of a decode step was 74 to 99 ms
# beside a compiler of the same priority, 27 to 31 ms with this niceness, and 25 to 28 ms without a
# compiler.
COMPILER_NICE = 10
SHORT_GRAMMAR_CHARACTERS = 8192
COMPILER_POLL_MS = 2  # between two checks of the compiler while the engine is idle
# The first process that the kernel kills when memory runs out has the highest score, up to 1000.
OOM_SCORE = "800"


def main() -> int:
    """Run the process to its end; the exit status is 0 only after a Stop."""
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_SECONDS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    end_with_parent()
    try:  # when memory runs out, the kernel should kill the engine and not its parent
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(OOM_SCORE)
    except OSError as problem:
        print(f"engine: oom_score_adj not set: {problem}", file=sys.stderr)
    config = msgspec.json.decode(os.environ[ipc.CONFIG_VARIABLE].encode(), type=EngineConfig)
    if warning := run_on(config.cores, config.memory_nodes):
        print(f"engine: {warning}", file=sys.stderr)
    if config.nice:
        lower_priority(config.nice)
    connection = socket.socket(fileno=int(os.environ[ipc.SOCKET_VARIABLE]))
    worker = Worker(config, connection, int(os.environ[ipc.RECEIVED_VARIABLE]))
    try:
        worker.load()
        worker.run()
        return 0
    except ParentGone:
        return 1
    except Exception as problem:
        cause = cause_of_failure(problem, loading=not worker.ready)
        worker.send(ipc.Died(cause, f"{type(problem).__name__}: {problem}"))
        if not isinstance(problem, ServingError | ModelError):
            raise
        print(f"engine: {problem}", file=sys.stderr)
        return 2


class ParentGone(Exception):
    """The parent has closed the socket."""


class Worker:
    """Loads the backend and runs the step loop; compiles grammars in a thread beside it.

    `received`: the eventfd that counts the bytes that were read from the connection.
    """

    def __init__(self, config: EngineConfig, connection: socket.socket, received: int) -> None:
        self.config = config
        self.ready = False
        self._socket = connection
        self._received = received
        self._socket.setblocking(True)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._frames = ipc.Frames()
        self._stopping = False  # a Stop has come
        self._drains = False  # and it asked to finish what is in flight
        self._stepped_at: float | None = None  # end of the last step, if another one follows
        self._compiling: dict[int, tuple[ipc.Submit, Future[Matcher]]] = {}
        # Long ones may take seconds, so short ones do not wait for them.
        self._compilers = {
            is_long: ThreadPoolExecutor(1, "grammars", os.nice, (COMPILER_NICE,))
            for is_long in (False, True)
        }

    def send(self, message: ipc.FromEngine) -> None:
        """Send a message to the parent. Raises ParentGone."""
        try:
            self._socket.sendall(ipc.frame(message))
        except OSError as problem:
            raise ParentGone from problem

    def load(self) -> None:
        """Load backend and tokenizer, then send Ready."""
        started = time.perf_counter()
        self.send(ipc.Loading(None, "starting"))
        self.backend = backend_class(self.config.backend)(
            self.config, lambda what, fraction: self.send(ipc.Loading(fraction, what))
        )
        if warning := misplaced_words(memory_share_on(self.config.memory_nodes)):
            print(f"engine: {warning}; {MISPLACED_ADVICE}", file=sys.stderr)
        info = self.backend.info
        # The engine keeps only the bytes of each token and the end tokens of a tokenizer.
        tokenizer = load_tokenizer(self.config.tokenizer_path or self.config.model_path)
        table, ends = tokenizer.token_bytes(), tokenizer.eos_ids
        # One entry for each logit. Models pad their vocabulary beyond the tokenizer's, and a
        # tokenizer may have tokens without a logit, which are never sampled.
        padding = [b""] * (info.vocabulary - len(table))
        table = [*table, *padding][: info.vocabulary]
        ends = frozenset(token for token in ends if 0 <= token < info.vocabulary)
        # Grammars must never sample marks, except where a call may begin.
        text_table = with_marks(table, tokenizer)
        self._grammars = Grammars(table, ends, text_table)
        self.scheduler = Scheduler(self.backend, text_table, ends, self.config)
        info = msgspec.structs.replace(info, settings=self.scheduler.settings)
        seconds = time.perf_counter() - started
        self.send(ipc.Ready(info, seconds, resident_bytes() or 0, peak_resident_bytes() or 0))
        self.ready = True
        # The collector need not look at what was loaded again, and rarely at the rest: a collection
        # delays a step. This happens while the parent announces that the engine is ready.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)

    def run(self) -> None:
        """Handle messages and step until a Stop is carried out."""
        scheduler = self.scheduler
        try:
            while True:
                has_work = scheduler.busy or bool(self._compiling)
                if self._stopping and not (self._drains and has_work):
                    break
                # Wait for a message if there is nothing else to do (None: for any time).
                wait_ms = COMPILER_POLL_MS if self._compiling else None
                if not scheduler.busy and scheduler.prepare_memory():
                    wait_ms = 0
                while self._poll.poll(0 if scheduler.busy else wait_ms):
                    self._receive()
                    wait_ms = 0
                for number, (submit, compilation) in [*self._compiling.items()]:
                    if compilation.done():
                        del self._compiling[number]
                        self._take_compiled(submit, compilation)
                if scheduler.busy and (self._drains or not self._stopping):
                    self.step()
        finally:
            for compiler in self._compilers.values():
                compiler.shutdown(wait=False, cancel_futures=True)
        self.backend.close()

    def _receive(self) -> None:
        """Carry out the messages that have arrived. Raises ParentGone."""
        try:
            data = self._socket.recv(1 << 20)
        except OSError as problem:
            raise ParentGone from problem
        if not data:
            raise ParentGone
        os.eventfd_write(self._received, len(data))
        for body in self._frames.feed(data):
            self.handle(ipc.decode_to_engine(body))

    def handle(self, message: ipc.ToEngine) -> None:
        """Carry out one message of the parent."""
        match message:
            case ipc.Submit() if message.request.sampling.is_constrained:
                sampling = message.request.sampling
                compiler = self._compilers[len(grammar_text(sampling)) > SHORT_GRAMMAR_CHARACTERS]
                compilation = compiler.submit(self._grammars.open, sampling)
                self._compiling[message.id] = message, compilation
            case ipc.Submit():
                self._add(message)
            case ipc.Cancel(id=number) if number in self._compiling:
                self._compiling.pop(number)[1].cancel()
                self._send_delta(ipc.Delta(number, 0, "", ipc.FinishReason.CANCELLED))
            case ipc.Cancel(id=number):
                self.scheduler.cancel(number)
            case ipc.Stop(drain=drain):
                self._stopping, self._drains = True, drain

    def step(self) -> None:
        """Run one scheduler step and send its Deltas."""
        began = time.perf_counter()
        deltas = self.scheduler.step()
        stats = self.scheduler.stats()
        if self._stepped_at is not None:
            stats.between_seconds = began - self._stepped_at
        self._stepped_at = time.perf_counter() if self.scheduler.busy else None
        self.send(ipc.Step(deltas, stats))

    def _take_compiled(self, submit: ipc.Submit, compilation: Future[Matcher]) -> None:
        """Queue a sequence whose grammar has been compiled, or end it if the grammar is refused."""
        problem = compilation.exception()
        if problem is None:
            self._add(submit, compilation.result())
            return
        if not isinstance(problem, Unsupported):
            description = f"{type(problem).__name__}: {problem}"
            problem = Unsupported(f"The grammar cannot be used: {description}")
        self._send_delta(failed_delta(submit.id, problem))

    def _add(self, submit: ipc.Submit, matcher: Matcher | None = None) -> None:
        """Queue a sequence, or end it if it can never run."""
        refusal = self.scheduler.add(submit, matcher)
        if refusal is not None:
            self._send_delta(refusal)

    def _send_delta(self, delta: ipc.Delta) -> None:
        """Send a Delta outside of a step."""
        stats = msgspec.structs.replace(self.scheduler.stats(), step_seconds=0.0)
        self.send(ipc.Step([delta], stats))


def cause_of_failure(problem: Exception, loading: bool) -> Cause:
    """Return the cause that an exception means for the supervisor."""
    if isinstance(problem, BackendUnavailable):
        return Cause.backend_missing
    if loading and isinstance(problem, Unsupported):
        return Cause.unsupported  # the configuration is refused, so another attempt would be, too
    if isinstance(problem, OutOfMemory | MemoryError):
        return Cause.load_oom if loading else Cause.runtime_oom
    return Cause.load_failed if loading else Cause.engine_died


if __name__ == "__main__":
    raise SystemExit(main())
