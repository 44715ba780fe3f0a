"""Prefix-aware request router for Ray Serve; Ray skips replicas that are full or dead."""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from graphcore.serving.replicas.prefix_table import PrefixTable, RoutingHint


class PrefixRouter(RequestRouter):
    """The router of a deployment whose methods have a `RoutingHint` as their first argument."""

    def initialize_state(self, slack: int = 0, **_: Any) -> None:
        """Take the keyword arguments of the deployment."""
        self._table = PrefixTable(slack)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in order of preference, one per rank."""
        by_id = {one.replica_id.unique_id: one for one in candidate_replicas}
        if pending_request is None:
            return [[by_id[one]] for one in self._table.order(RoutingHint(), list(by_id))]
        pending_request.routing_context.should_backoff = True  # before all are tried again
        request = pending_request.metadata.internal_request_id
        return [[by_id[one]] for one in self._table.order(pending_request.args[0], list(by_id), request)]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that was sent; Ray calls `on_request_completed` once for each."""
        super().on_send_request(replica_id)
        self._table.note_sent(replica_id.unique_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record which replica accepted a request."""
        request = pending_request.metadata.internal_request_id
        self._table.note_taken(pending_request.args[0], replica_id.unique_id, request)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting a request."""
        self._table.note_end(replica_id.unique_id)
