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

from cluster.member_auth import OPEN, MemberAuth, Role

MAX_MESSAGE_BYTES = 16 << 20
PING_EVERY_MS = 2_000
PING_TIMEOUT_MS = 2_000
"""A peer that is busy is not lost: compiling a grammar may hold Python's lock for a second, and a
verifier that is taken for lost computes all that it was running anew elsewhere."""

CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.keepalive_time_ms", PING_EVERY_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Members on one node share no subchannels, so that one lost peer is one lost peer.
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.keepalive_time_ms", PING_EVERY_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    # Of one connection; a member opens one stream and a few short calls.
    ("grpc.max_concurrent_streams", 128),
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
    auth: MemberAuth = OPEN,
) -> RpcServer:
    """Start a server with health and, if it is open, reflection beside what `register` adds."""
    server = grpc.aio.server(options=list(SERVER_OPTIONS), interceptors=auth.interceptors())
    register(server)
    health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if auth.is_open:
        names = (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    bound = auth.add_port(server, f"{host}:{port}")
    await server.start()
    for name in ("", service_name):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    return RpcServer(server, f"{host}:{bound}", health_servicer)


def open_channel(
    address: str,
    peer: Role,
    *,
    auth: MemberAuth = OPEN,
    max_receive_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """A channel to the server of a member that must be a `peer`; calls on it must carry
    `auth.metadata`. A message over `max_receive_bytes` ends its stream."""
    options = dict(CHANNEL_OPTIONS) | {"grpc.max_receive_message_length": max_receive_bytes}
    return auth.channel(address, peer, options)
