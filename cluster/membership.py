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

_EXISTENCE_POLL_S = 1.0
_listeners: dict[tuple[str, str], list[Listener]] = {}
_latest: dict[tuple[str, str], Members] = {}


def bind_host(config: RpcConfig) -> str:
    """The address that a member's gRPC server binds to and its peers dial."""
    return ray.util.get_node_ip_address() if config.bind_host == "auto" else config.bind_host


def member_metadata(member: Member) -> dict[str, Any]:
    """What a replica's `record_replica_metadata` hook returns."""
    return asdict(member)


class MemberWatch:
    """Calls `on_change` on the event loop now and whenever a deployment's replicas change.

    The deployment need not exist yet, and may come and go. Make it inside a running event loop.
    """

    def __init__(self, deployment: str, application: str, on_change: Listener) -> None:
        self._deployment = deployment
        self._application = application
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        _listeners.setdefault((application, deployment), []).append(self._notify)
        self._attaching = asyncio.create_task(self._attach())

    async def handle(self) -> DeploymentHandle[Any]:
        """The handle that is watched through; waits for the deployment to exist."""
        return await asyncio.shield(self._attaching)

    def close(self) -> None:
        _listeners[self._application, self._deployment].remove(self._notify)
        self._attaching.cancel()

    async def _attach(self) -> DeploymentHandle[Any]:
        """Get a handle and start its request router, and with it the broadcast."""
        while True:
            try:
                handle = await asyncio.to_thread(
                    serve.get_deployment_handle, self._deployment, self._application
                )
            except KeyError:  # It does not exist yet.
                await asyncio.sleep(_EXISTENCE_POLL_S)
                continue
            handle = handle.options()
            if known := _latest.get((self._application, self._deployment)):
                self._on_change(known)
            return handle

    def _notify(self, members: Members) -> None:
        self._loop.call_soon_threadsafe(self._on_change, members)


def publish_members(application: str, deployment: str, members: Members) -> None:
    """Tell the listeners of this process. Called on Serve's router thread."""
    key = (application, deployment)
    if members == _latest.get(key):
        return
    _latest[key] = members
    for listener in list(_listeners.get(key, ())):
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
