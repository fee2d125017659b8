"""Background tasks of one owner: kept from the garbage collector, seen to fail, ended together.

    background = Background("the registry", expected=(ServingError,))
    task = background.keep(self._load(tenant))     # runs from now on
    background.cancel()                            # all but the task that calls

asyncio keeps only weak references to tasks, and shows a failure that nobody awaits late or never.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """`owner` is named where a task fails.

    `expected`: failures that are for whoever awaits the task, not for the log. `on_failure` is told
    of any other, which is a bug.
    """

    def __init__(
        self,
        owner: str,
        expected: tuple[type[Exception], ...] = (),
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._owner = owner
        self._expected = expected
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def keep(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """Run it from now on."""
        task: asyncio.Task[T] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancel all but the calling task; returns them, to be awaited where their end matters."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        return tasks

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        problem = None if task.cancelled() else task.exception()
        if problem is None or isinstance(problem, self._expected):
            return
        context = {"message": f"{self._owner} failed", "exception": problem, "task": task}
        asyncio.get_running_loop().call_exception_handler(context)
        if self._on_failure is not None:
            self._on_failure(problem)
