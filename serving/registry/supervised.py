"""The supervisor of a model that is prepared, by the options of its server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from serving.hardware.gpu import find_gpus
from serving.placement.decision import Placement
from serving.placement.plan import has_room_again
from serving.registry.options import ServeOptions
from serving.registry.prepare import Prepared
from serving.supervisor.admission import QueueBounds
from serving.supervisor.restart_policy import RecoveryLimits
from serving.supervisor.status import Event
from serving.supervisor.supervisor import Supervisor


def supervisor_of(
    options: ServeOptions,
    prepared: Prepared,
    placed: Callable[[], Placement],
    on_event: Callable[[Event], None],
    on_output: Callable[[str], None],
) -> Supervisor:
    """Not started. `on_event` and `on_output` hear of its engines and what they print."""
    return Supervisor(
        prepared.configs,
        bounds=QueueBounds(
            waiting_requests=options.max_waiting,
            wait_seconds=options.max_wait_seconds,
            ttft_seconds=options.ttft_slo_seconds,
        ),
        limits=RecoveryLimits(health_timeout_seconds=options.health_timeout_seconds),
        standby=prepared.model.standby == "warm",
        preferred_usable=_preferred_usable(placed),
        on_event=on_event,
        on_output=on_output,
    )


def _preferred_usable(placed: Callable[[], Placement]) -> Callable[[], Awaitable[bool]]:
    """Asks the GPU's driver, in a subprocess, whether the first engine would fit now."""

    async def usable() -> bool:
        placement = placed()
        if placement.device != "gpu":
            return True
        found = await asyncio.to_thread(find_gpus)
        return has_room_again(placement, found.gpus)

    return usable
