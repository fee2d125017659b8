"""Ray Serve's request router with our choice of replica. It lives in the process of the front.

Ray pickles this module by value: what is one in a process stands in others, reached by their names.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serving.ray import fleet
from serving.ray.prefixes import PrefixTable

CHOSEN_SECONDS = 1.0  # a request that was not sent until then is not on its way any more


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # ray has no types where it is missing
    """The replica that PrefixTable chooses first, then all others, the least busy first.

    The last argument of a request is its Way.
    """

    def initialize_state(self, **_: Any) -> None:
        self._table = PrefixTable()
        # Request -> the replica chosen for it, and when: Ray counts a request once it is sent.
        self._chosen: dict[str, tuple[str, float]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas; Ray asks the next rank where all of one are full."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        by_name = {_name(one.replica_id): one for one in candidate_replicas}
        now = time.monotonic()
        self._chosen = {
            key: one for key, one in self._chosen.items() if now - one[1] < CHOSEN_SECONDS
        }
        on_the_way = Counter(name for name, _ in self._chosen.values())
        loads = {
            name: (self.replica_queue_len_cache.get(one.replica_id) or 0) + on_the_way[name]
            for name, one in by_name.items()
        }
        way = _way(pending_request)
        open_to_it = {name: load for name, load in loads.items() if name not in way.avoided}
        name = self._table.choose(way.blocks, open_to_it or loads)
        self._chosen[pending_request.metadata.internal_request_id] = name, now
        chosen = by_name[name]
        return [[chosen], [one for one in candidate_replicas if one is not chosen]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: Any, result: Any
    ) -> None:
        self._chosen.pop(pending_request.metadata.internal_request_id, None)
        self._table.sent(_way(pending_request).blocks, _name(replica_id))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        fleet.FLEET.now({_name(one.replica_id): one.node_id for one in self.curr_replicas.values()})


def _name(replica_id: Any) -> str:
    return str(replica_id.unique_id)


def _way(request: PendingRequest) -> fleet.Way:
    found: fleet.Way = request.args[-1]
    return found
