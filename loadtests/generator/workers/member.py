"""A worker's part of a level (master.py): it does what the master says, within its own command.

A worker that was started with `crossover load URL --join` sends to that URL, with its own key, and
to no other: whoever answers at the master's address cannot point it elsewhere, name its variables,
or have it read its files.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import gevent
import msgspec

from loadtests.errors import LoadError
from loadtests.generator.channel import encode
from loadtests.generator.connection import clock
from loadtests.generator.dispatcher import Dispatcher
from loadtests.generator.endpoint import Target
from loadtests.generator.launcher import OWN_TARGET_VARIABLE
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.messages import Told
from loadtests.generator.request_factory import Share
from loadtests.workload.arrivals import Trace
from models.errors import printable

log = logging.getLogger("crossover")
ALONE_SECONDS = 15.0  # without a word of the master, during a level

MakeDispatcher = Callable[[LoadPlan, Share, Callable[[Told], None] | None], Dispatcher]


class Member:
    """Works on one level after the other for a master."""

    def __init__(
        self, runner: Any, make: MakeDispatcher, over: Callable[[], None], is_led: bool
    ) -> None:
        """`make` gets where to tell, None: wherever it tells by itself. `over`: a level is."""
        self._runner = runner
        self._make = make
        self._over = over
        self._is_led = is_led
        self._dispatcher: Dispatcher | None = None
        self._level = 0
        self._heard = clock()
        own = os.environ.get(OWN_TARGET_VARIABLE)
        self._own = None if own is None else msgspec.json.decode(own, type=Target)

    @property
    def listeners(self) -> dict[str, Callable[[Any], None]]:
        """Message -> who takes its data."""
        return {
            "crossover_prepare": self._prepare,
            "crossover_begin": self._begin,
            "crossover_ping": self._ping,
            "crossover_settled": self._others_settled,
            "crossover_stop": self._stop,
        }

    def _send(self, name: str, level: int, **data: Any) -> None:
        self._runner.send_message(name, data | {"level": level})

    def _prepare(self, data: dict[str, Any]) -> None:
        if data["level"] == self._level:  # told again
            return
        level = self._level = data["level"]
        if (failed := self._dispatcher) is not None:  # of a level that failed elsewhere
            failed.stop(is_decided=True)
            if failed.began.is_set():
                failed.finished.wait()
            else:
                self._over()
                failed.leave_out()

        def tell(told: Told) -> None:
            self._send("crossover_told", level, line=encode(told))

        try:
            plan = allowed(msgspec.json.decode(data["plan"], type=LoadPlan), self._own)
            share = Share(data["index"], data["workers"])
            dispatcher = self._make(plan, share, tell if self._is_led else None)
            dispatcher.settled = lambda: self._send("crossover_settled", level)
            dispatcher.others_settled.clear()
            self._dispatcher = dispatcher
        except Exception as problem:
            self._fail(level, problem)
            return
        if self._own is not None:
            log.info(
                "worker %d of %d: %s to %s for %g s",
                *(share.index, share.workers, plan.load_in_words, plan.target.url),
                plan.duration_seconds,
            )
        self._send("crossover_prepared", level, draws=dispatcher.factory.draws)

    def _begin(self, data: dict[str, Any]) -> None:
        level, dispatcher = data["level"], self._dispatcher
        if level != self._level or dispatcher is None:
            return
        alone = gevent.spawn(self._stop_alone, dispatcher)
        try:
            account = dispatcher.run(data["origin"])
        except Exception as problem:
            self._fail(level, problem)
            return
        finally:
            alone.kill(block=False)
            if self._dispatcher is dispatcher:
                self._dispatcher = None
            self._over()
        self._send("crossover_drained", level, account=msgspec.to_builtins(account))

    def _ping(self, data: dict[str, Any]) -> None:
        there = clock()
        self._heard = there
        seen = {"sent": data["sent"], "there": there, "unix": time.time()}
        self._send("crossover_pong", data["level"], **seen)

    def _others_settled(self, data: dict[str, Any]) -> None:
        if self._dispatcher is not None and data["level"] == self._level:
            self._dispatcher.others_settled.set()

    def _stop(self, data: dict[str, Any]) -> None:
        if self._dispatcher is not None and data["level"] == self._level:
            self._dispatcher.stop(is_decided=True)

    def _stop_alone(self, dispatcher: Dispatcher) -> None:
        """No load without a master that counts it."""
        self._heard = clock()
        while clock() - self._heard < ALONE_SECONDS:
            gevent.sleep(1.0)
        log.error("the master has not been heard for %g s: nothing more is sent", ALONE_SECONDS)
        dispatcher.stop(is_decided=True)

    def _fail(self, level: int, problem: Exception) -> None:
        """The master must end the level for all."""
        log.error("%s", printable(str(problem)), exc_info=not isinstance(problem, LoadError))
        self._send("crossover_failed", level, problem=f"{problem}")


def allowed(plan: LoadPlan, own: Target | None) -> LoadPlan:
    """The plan as a worker with a target of its `own` carries it out; None: as it is.

    Model, route and fields of the body are the master's. Raises LoadError for a plan that names
    files: they are the worker's, and nobody has said which.
    """
    if own is None:
        return plan
    workload = plan.workload
    if workload.file or workload.replay or isinstance(plan.arrivals, Trace):
        raise LoadError(
            "a worker that joined reads no trace on its machine: replay traces with --workers"
        )
    target = msgspec.structs.replace(
        plan.target, url=own.url, api_key_env=own.api_key_env, verify_tls=own.verify_tls
    )
    return msgspec.structs.replace(plan, target=target, requests_file=None)
