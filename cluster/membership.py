"""Who is there: Serve's own broadcast of a deployment's replicas, with the metadata of each.

Serve tells every process that holds a handle which replicas run, within a quarter of a second, by
updating that handle's request router. Our request router is Serve's with one thing added: it
publishes what it is told to this module, so that members dial one another directly. Nothing is
polled and nothing on the hot path asks Serve.

This module and launcher.py are the two of the package that import Ray.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.config import RpcConfig
from cluster.types import Member, Members

Listener = Callable[[Members], None]

_listeners: dict[tuple[str, str], list[Listener]] = {}
_latest: dict[tuple[str, str], Members] = {}


def bind_host(config: RpcConfig) -> str:
    """The address that a member's gRPC server binds to and its peers dial."""
    return ray.util.get_node_ip_address() if config.bind_host == "auto" else config.bind_host


def member_metadata(member: Member) -> dict[str, Any]:
    """What a replica's `record_replica_metadata` hook returns."""
    return asdict(member)


def watch_members(deployment: str, application: str, on_change: Listener) -> DeploymentHandle[Any]:
    """Call `on_change` on the running event loop now and whenever the replicas change.

    The deployment need not exist yet. The handle returned is the one that is watched through.
    """
    loop = asyncio.get_running_loop()
    key = (application, deployment)

    def notify(members: Members) -> None:
        loop.call_soon_threadsafe(on_change, members)

    _listeners.setdefault(key, []).append(notify)
    handle = serve.get_deployment_handle(deployment, application)
    handle = handle.options()  # Starts the handle's request router, and with it the broadcast.
    if key in _latest:
        notify(_latest[key])
    return handle


def publish_members(application: str, deployment: str, members: Members) -> None:
    """Tell the listeners of this process. Called on Serve's router thread."""
    key = (application, deployment)
    if members == _latest.get(key):
        return
    _latest[key] = members
    for listener in _listeners.get(key, ()):
        listener(members)


class MembershipRequestRouter(RequestRouter):
    """Serve's request router that publishes the replicas; calls themselves go to any of them."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        # Imported here because Serve ships the class by value: the module holds the state.
        from cluster.membership import publish_members
        from cluster.types import Member

        members = [Member(**replica.replica_metadata) for replica in replicas]
        publish_members(
            self._deployment_id.app_name,
            self._deployment_id.name,
            {member.incarnation: member for member in members},
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        return [random.sample(candidate_replicas, len(candidate_replicas))]
