"""gRPC servers and channels as every member opens them.

Client and server keepalive are set together: `http2.ping_timeout_ms` is what bounds the detection
of a hung peer (keepalive_timeout alone waits 60 s), and a server that is not told to expect pings
ends the connection with "too_many_pings".
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

MAX_MESSAGE_BYTES = 16 << 20

CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Members on one node share no subchannels, so that one lost peer is one lost peer.
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
)


def new_incarnation() -> str:
    """A random name for one life of one member, so that a reused address is never mistaken."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class RpcServer:
    """A started server and where it listens."""

    server: grpc.aio.Server
    address: str
    """host:port that peers dial."""
    health: health.aio.HealthServicer  # type: ignore[name-defined]

    async def stop(self, grace_s: float) -> None:
        """Refuse new streams at once, end the open ones after `grace_s`. Idempotent."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


async def start_rpc_server(
    register: Callable[[grpc.aio.Server], None],
    service_name: str,
    *,
    host: str,
    port: int = 0,
) -> RpcServer:
    """Start a server with health and reflection beside the service that `register` adds."""
    server = grpc.aio.server(options=list(SERVER_OPTIONS))
    register(server)
    health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    bound = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    for name in ("", service_name):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    return RpcServer(server, f"{host}:{bound}", health_servicer)


def open_channel(address: str, *, max_receive_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to a member's server. A message over `max_receive_bytes` ends its stream."""
    options = dict(CHANNEL_OPTIONS) | {"grpc.max_receive_message_length": max_receive_bytes}
    return grpc.aio.insecure_channel(address, options=list(options.items()))
