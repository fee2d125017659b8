"""How many replicas `--replicas MIN-MAX` has: Ray Serve's policy, by what replicas say. Pure.

Ray counts the requests that go through it, and ours go to replicas directly. It rounds up, keeps to
MIN and MAX, and waits before it follows.
"""

from __future__ import annotations

from typing import Any

IN_FLIGHT = "in_flight"  # what a replica says of itself


def wanted(context: Any) -> tuple[float, dict[str, Any]]:
    """As many as bring each to its target; as it is where no replica has said anything yet."""
    of_each = (context.aggregated_metrics or {}).get(IN_FLIGHT)
    if not of_each:
        return context.target_num_replicas, {}
    return sum(of_each.values()) / context.config.get_target_ongoing_requests(), {}
