"""What a router asks of any member on demand: the service of cluster/protocol/members.proto."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from cluster.protocol import members_pb2, members_pb2_grpc

SERVICE_NAME = members_pb2.DESCRIPTOR.services_by_name["Members"].full_name

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """What a router tells of itself."""

    ready: bool = False
    """Takes requests."""
    in_flight: int = 0
    """Generations that hold a slot."""
    mode: str = ""
    """Path of auto requests."""
    reason: str = ""
    """Why, for a person."""
    since_s: float = 0.0
    """How long that mode has held."""


class MembersServicer(members_pb2_grpc.MembersServicer):
    """Answers from `metrics`, which writes an exposition, and at a router from `status`."""

    def __init__(
        self, metrics: Callable[[], str], status: Callable[[], RouterStatus] | None = None
    ) -> None:
        self._metrics = metrics
        self._status = status

    def register(self, server: grpc.aio.Server) -> None:
        """Serve this beside the server's other services."""
        members_pb2_grpc.add_MembersServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    async def Metrics(  # noqa: N802  the name is the protocol's
        self,
        request: members_pb2.MetricsRequest,
        context: grpc.aio.ServicerContext[members_pb2.MetricsRequest, members_pb2.MetricsReply],
    ) -> members_pb2.MetricsReply:
        """See members.proto."""
        return members_pb2.MetricsReply(text=self._metrics())

    async def RouterStatus(  # noqa: N802
        self,
        request: members_pb2.RouterStatusRequest,
        context: grpc.aio.ServicerContext[
            members_pb2.RouterStatusRequest, members_pb2.RouterStatusReply
        ],
    ) -> members_pb2.RouterStatusReply:
        """See members.proto."""
        if self._status is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this member is no router")
        status = self._status()
        return members_pb2.RouterStatusReply(
            ready=status.ready,
            in_flight=status.in_flight,
            mode=status.mode,
            reason=status.reason,
            since_s=status.since_s,
        )


async def ask_metrics(channel: grpc.aio.Channel, timeout_s: float, metadata: Metadata = ()) -> str:
    """A member's exposition. Raises AioRpcError."""
    stub = members_pb2_grpc.MembersStub(channel)  # type: ignore[no-untyped-call]
    reply = await stub.Metrics(members_pb2.MetricsRequest(), timeout=timeout_s, metadata=metadata)
    return str(reply.text)


async def ask_router_status(
    channel: grpc.aio.Channel, timeout_s: float, metadata: Metadata = ()
) -> RouterStatus:
    """A router's own state. Raises AioRpcError."""
    stub = members_pb2_grpc.MembersStub(channel)  # type: ignore[no-untyped-call]
    reply = await stub.RouterStatus(
        members_pb2.RouterStatusRequest(), timeout=timeout_s, metadata=metadata
    )
    return RouterStatus(reply.ready, reply.in_flight, reply.mode, reply.reason, reply.since_s)
