"""What is looked at all the time while a model is served: whether an engine hangs, and how far behind this process itself is.

Both run until they are cancelled. What to do about an engine that is given up is the supervisor's, when its process has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set

from serving.admission import Ledger
from serving.life import Life
from serving.recovery import RecoveryLimits

LAG_LOOK_SECONDS = 0.1


async def watch_health(engines: Set[Life], limits: RecoveryLimits, clock: Callable[[], float]) -> None:
    """Gives up every engine that hangs; `engines` changes meanwhile."""
    while True:
        await asyncio.sleep(min(0.5, limits.health_timeout_seconds / 5))
        now = clock()
        for engine in list(engines):
            trouble = engine.trouble(now, limits)
            if trouble is not None:
                engine.give_up(trouble)


async def watch_lag(ledger: Ledger, clock: Callable[[], float]) -> None:
    """Keeps `ledger.lag_seconds`: what waits in this process's sockets was not seen by the ledger yet."""
    while True:
        due = clock() + LAG_LOOK_SECONDS
        await asyncio.sleep(LAG_LOOK_SECONDS)
        ledger.lag_seconds = max(0.0, clock() - due)
