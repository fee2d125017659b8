"""Where a Crossover server's time went, as its /metrics say.

source = EngineClock("http://127.0.0.1:8000")
source.read()           # an EngineTime; None: another server, or it does not answer
"""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from crossover.loadtests.errors import LoadError
from crossover.loadtests.load_generator.http_connection import connect, fetch, get_bytes
from crossover.loadtests.records.journal_events import EngineTime

TIMEOUT_SECONDS = 2.0
# steps, seconds of the backend, seconds of everything else while there was work
NAMES = (
    "crossover_step_backend_seconds_count",
    "crossover_step_backend_seconds_sum",
    "crossover_engine_loop_hold_seconds_sum",
)


class EngineClock:
    """One endpoint's. Never raises for what the endpoint does."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url, self._key = url, api_key

    def read(self) -> EngineTime | None:
        """Of all its models together."""
        found: dict[str, float] = {}
        try:
            with connect(self._url, api_key=self._key) as pool:
                _, _, body = fetch(pool, get_bytes(pool, "/metrics"), TIMEOUT_SECONDS)
            for family in text_string_to_metric_families(body.decode(errors="replace")):
                for one in family.samples:
                    found[one.name] = found.get(one.name, 0.0) + one.value
        except (LoadError, ValueError):
            return None
        if any(name not in found for name in NAMES):
            return None
        steps, device, host = (found[name] for name in NAMES)
        return EngineTime(steps=round(steps), device_seconds=device, host_seconds=host)
