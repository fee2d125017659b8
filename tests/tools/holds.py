"""For how long a server's event loop, or its engine's step loop, was held up.

    with held(port, "event_loop") as hold:     # a server of `watched_server`
        ...                                    # an attack
    assert hold.seconds <= 0.02

`watched_server` is `python -m serving` that looks at its loop every 2 ms instead of every 50.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.serving.cli.test_serve import Server, server
from tests.serving.fakes import ask

MOST_SECONDS = 0.02
_MAIN = (
    "import serving.metrics; serving.metrics.HOLD_PERIOD_SECONDS = 0.002; "
    "from serving.__main__ import main; main()"
)


class Hold:
    """`seconds`: the longest hold is no longer than this bound of the histogram; 0: there was none
    of a millisecond."""

    seconds = 0.0


@contextmanager
def watched_server(folder: Path, *arguments: str, **options: Any) -> Iterator[Server]:
    """A server whose holds of 2 ms and more are all seen."""
    with server(folder, *arguments, main=("-c", _MAIN), **options) as one:
        one.wait_ready()
        yield one


@contextmanager
def held(port: int, loop: str = "event_loop") -> Iterator[Hold]:
    """`loop`: "event_loop" (HTTP side) or "engine_loop"."""
    hold = Hold()
    before = _counts(port, loop)
    yield hold
    after = _counts(port, loop)
    bounds = sorted(after)
    below = 0.0
    for bound in bounds:
        count = after[bound] - before.get(bound, 0.0)
        if count > below and bound > bounds[0]:
            hold.seconds = bound
        below = count


def _counts(port: int, loop: str) -> dict[float, float]:
    """Holds of at most so many seconds."""
    found: dict[float, float] = {}
    line = re.compile(
        rf'^crossover_{loop}_hold_seconds_bucket{{.*le="([^"]+)".*}} (\S+)$', re.MULTILINE
    )
    for bound, count in line.findall(ask(port, "GET", "/metrics").body.decode()):
        found[float(bound)] = found.get(float(bound), 0.0) + float(count)
    return found
