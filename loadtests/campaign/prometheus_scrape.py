"""How a Crossover server's engine spent its time, read from the server's /metrics.

clock = EngineClock(Target(url="http://127.0.0.1:8000"))
clock.read()           # an EngineTime; None: another server, or it does not answer
"""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from crossover.loadtests.errors import LoadError
from crossover.loadtests.load_generator.http_connection import fetch, get_bytes
from crossover.loadtests.load_generator.openai_endpoint import pool_for
from crossover.loadtests.load_generator.target import Target
from crossover.loadtests.records.journal_events import EngineTime

TIMEOUT_SECONDS = 2.0
STEPS = "crossover_step_backend_seconds_count"
DEVICE_SECONDS = "crossover_step_backend_seconds_sum"
HOST_SECONDS = "crossover_engine_loop_hold_seconds_sum"  # busy time outside the backend


class EngineClock:
    """Reads the engine time of one endpoint."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def read(self) -> EngineTime | None:
        """Return the engine time since the server started, of all its models together.

        None: it is not a Crossover server, or it does not answer.
        """
        sums: dict[str, float] = {}  # metric -> sum over its labels
        try:
            with pool_for(self._target) as pool:
                _, _, body = fetch(pool, get_bytes(pool, "/metrics"), TIMEOUT_SECONDS)
            for family in text_string_to_metric_families(body.decode(errors="replace")):
                for sample in family.samples:
                    sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        except (LoadError, ValueError):
            return None
        if not {STEPS, DEVICE_SECONDS, HOST_SECONDS} <= sums.keys():
            return None
        return EngineTime(
            steps=round(sums[STEPS]),
            device_seconds=sums[DEVICE_SECONDS],
            host_seconds=sums[HOST_SECONDS],
        )
