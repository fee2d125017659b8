"""Workers that run tests: forks of the process that has collected them, by `pytest --forks N`.

They share what collecting has imported, which takes 11 s of CPU, and its memory. A worker that has
nothing left takes the next group of tests, in the order of collection, and makes the fixtures of a
session for itself. If one ends in the middle of a test, that test fails and another worker goes on
with the next.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest
from _pytest import runner

Group = list[int]  # indices of a session's tests, which one worker runs one after the other


class Worker:
    """A fork, as the process that started it sees it."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self.connection = connection
        self.left: deque[int] = deque()  # tests that it has and has not ended
        self.is_running = False  # the first of them


def run_in_forks(session: pytest.Session, count: int, group_of: Callable[[str], str]) -> None:
    """Run the tests of a session in `count` workers. Those of which `group_of` returns the same for
    their node IDs run one after the other in one of them.
    """
    groups: dict[str, Group] = {}
    for index, item in enumerate(session.items):
        groups.setdefault(group_of(item.nodeid), []).append(index)
    workers = _Workers(session, deque(groups.values()))
    try:
        for _ in range(min(count, len(groups))):
            workers.start()
        workers.run()
    finally:
        workers.stop()


class _Workers:
    def __init__(self, session: pytest.Session, queue: deque[Group]) -> None:
        self.session = session
        self.queue = queue
        self.workers: dict[Connection, Worker] = {}
        self.started = 0

    def start(self) -> None:
        self.started += 1
        ours, theirs = Pipe()
        folder = self.session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if (pid := os.fork()) == 0:
            for connection in (ours, *self.workers):
                connection.close()
            _work(self.session, theirs, folder / f"worker-{self.started}")
        theirs.close()
        self.workers[ours] = Worker(pid, ours)

    def run(self) -> None:
        while self.workers:
            for connection in wait(list(self.workers)):
                assert isinstance(connection, Connection)
                worker = self.workers[connection]
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._ended(worker)
                else:
                    getattr(self, f"_{kind}")(worker, value)
                if self.session.shouldfail:
                    raise self.session.Failed(self.session.shouldfail)
                if self.session.shouldstop:
                    raise self.session.Interrupted(self.session.shouldstop)

    def stop(self) -> None:
        """End the workers that are left, with their fixtures."""
        for worker in self.workers.values():
            os.kill(worker.pid, signal.SIGINT)
            worker.connection.close()
        for worker in self.workers.values():
            os.waitpid(worker.pid, 0)

    # --- what workers say

    def _next(self, worker: Worker, _: None) -> None:
        """It needs a group of tests; an empty one means that there are no more."""
        group = self.queue.popleft() if self.queue else []
        worker.left.extend(group)
        worker.connection.send(group)

    def _report(self, worker: Worker, data: dict[str, Any]) -> None:
        hook = self.session.config.hook
        worker.is_running = data["when"] != "teardown"
        report = hook.pytest_report_from_serializable(config=self.session.config, data=data)
        hook.pytest_runtest_logreport(report=report)
        if not worker.is_running:
            worker.left.popleft()
            hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)

    def _begin(self, worker: Worker, _: None) -> None:
        worker.is_running = True

    def _broken(self, _: Worker, message: str) -> None:
        raise RuntimeError(message)

    def _ended(self, worker: Worker) -> None:
        """It has ended. Tests that it has not begun go to another worker."""
        del self.workers[worker.connection]
        worker.connection.close()
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if worker.is_running:
            item = self.session.items[worker.left.popleft()]
            report = pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords={},
                outcome="failed",
                longrepr=f"The process that ran this test ended with status {status}.",
                when="call",
            )
            self.session.config.hook.pytest_runtest_logreport(report=report)
        elif status:
            raise RuntimeError(f"A worker ended with status {status} after its tests.")
        if worker.left:
            self.queue.appendleft(list(worker.left))
            self.start()


def _work(session: pytest.Session, connection: Connection, folder: Any) -> NoReturn:
    """In a fork: run the tests that the other end sends, to the end of the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    config = session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folder.mkdir()
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]

    class Reports:
        @staticmethod
        def pytest_runtest_logreport(report: pytest.TestReport) -> None:
            data = config.hook.pytest_report_to_serializable(config=config, report=report)
            connection.send(("report", data))

    config.pluginmanager.register(Reports())
    status = 1
    try:
        try:
            _run_all(session, connection)
        finally:
            runner.pytest_sessionfinish(session)  # the fixtures of the session, if any are left
        status = 0
    except (KeyboardInterrupt, EOFError, BrokenPipeError):  # the run is over
        pass
    except BaseException:
        connection.send(("broken", traceback.format_exc()))
    finally:
        os._exit(status)


def _run_all(session: pytest.Session, connection: Connection) -> None:
    def next_group() -> Group:
        connection.send(("next", None))
        group: Group = connection.recv()
        return group

    left = next_group()
    while left:
        item = session.items[left.pop(0)]
        left = left or next_group()
        following = session.items[left[0]] if left else None
        connection.send(("begin", None))
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
