"""Ray Serve's request router, by which the front learns of replicas. It lives in the process of the
front.

Requests for answers do not go this way, only the question where a replica is asked: to the replica
that it names.

Ray pickles this module by value: what is one in a process stands in others, reached by their names.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serving.ray import fleet


class NamedRouter(RequestRouter):  # type: ignore[misc]  # ray has no types where it is missing
    """The replica that the only argument names; any one where it is gone."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        asked = "" if pending_request is None else pending_request.args[-1]
        named = [one for one in candidate_replicas if _name(one.replica_id) == asked]
        return [named or candidate_replicas]

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
