"""Who is there: Serve's own broadcast of a deployment's replicas, with the metadata of each.

Serve tells every process that holds a handle which replicas run, within a quarter of a second, by
updating that handle's request router. We read the replicas there, in our own memory, and members
dial one another directly: no call is made for it, and nothing on the hot path asks Serve.

The replicas stand in an attribute of the handle that Ray does not promise to keep. The documented
way to see them, a request router of one's own on the watched deployment, is refused under Serve's
HAProxy ingress for the first deployment of an application, which ours are. tests/end_to_end/
test_serve.py holds this module to what it says: members find one another, and a new one is found.

This module and launcher.py are the two of the package that import Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from cluster.config import RpcConfig
from cluster.metrics import MemberLabels
from cluster.types import Member, Members

logger = logging.getLogger("ray.serve")

Listener = Callable[[Members], None]

DEPLOYMENT_OPTIONS: Mapping[str, Any] = {
    "health_check_period_s": 5,
    "health_check_timeout_s": 10,
    "graceful_shutdown_timeout_s": 20,
    "graceful_shutdown_wait_loop_s": 0.1,
}
"""What every deployment of ours starts from; the Serve YAML may say otherwise."""

_EXISTENCE_POLL_S = 1.0
_LOOK_S = 0.1
"""Between two looks at the replicas, which cost nothing while they are unchanged."""


def bind_host(config: RpcConfig) -> str:
    """The address that a member's gRPC server binds to and its peers dial."""
    return ray.util.get_node_ip_address() if config.bind_host == "auto" else config.bind_host


def this_replica(
    incarnation: str,
    address: str = "",
    model: str = "",
    fingerprint: str = "",
    decoder: str = "",
) -> Member:
    """The member that this Serve replica is."""
    return Member(
        incarnation=incarnation,
        address=address,
        replica_id=serve.get_replica_context().replica_id.unique_id,
        node_id=ray.get_runtime_context().get_node_id(),
        pid=os.getpid(),
        model=model,
        fingerprint=fingerprint,
        decoder=decoder,
    )


def replica_labels() -> MemberLabels:
    """Serve's names of this replica, as its metrics carry them."""
    context = serve.get_replica_context()
    return MemberLabels(context.deployment, context.replica_id.unique_id, context.app_name)


def member_metadata(member: Member) -> dict[str, Any]:
    """What a replica's `record_replica_metadata` hook returns."""
    return asdict(member)


class MemberWatch:
    """Calls `on_change` on the event loop whenever a deployment's replicas change.

    The deployment need not exist yet, and may come and go. Make it inside a running event loop.
    """

    def __init__(self, deployment: str, application: str, on_change: Listener) -> None:
        self._deployment = deployment
        self._application = application
        self._on_change = on_change
        self._attaching = asyncio.create_task(self._attach())
        self._watching = asyncio.create_task(self._watch())

    async def handle(self) -> DeploymentHandle[Any]:
        """The handle that is watched through; waits for the deployment to exist."""
        return await asyncio.shield(self._attaching)

    def close(self) -> None:
        self._watching.cancel()
        self._attaching.cancel()

    async def _attach(self) -> DeploymentHandle[Any]:
        """Get a handle and start its request router, and with it the broadcast."""
        while True:
            try:
                handle = await asyncio.to_thread(
                    serve.get_deployment_handle, self._deployment, self._application
                )
                return handle.options()
            except (KeyError, RayError) as error:
                if not isinstance(error, KeyError):  # That one says: it does not exist yet.
                    logger.warning("Serve does not answer, trying again: %s", error)
                await asyncio.sleep(_EXISTENCE_POLL_S)

    async def _watch(self) -> None:
        handle = await self.handle()
        seen: Mapping[Any, Any] = {}
        while True:
            replicas = _replicas(handle)
            if replicas is not seen:  # Serve makes a new mapping for every change.
                seen = replicas
                members = [Member(**replica.replica_metadata) for replica in replicas.values()]
                self._on_change({member.incarnation: member for member in members})
            await asyncio.sleep(_LOOK_S)


_NO_REPLICAS: Mapping[Any, Any] = {}


def _replicas(handle: DeploymentHandle[Any]) -> Mapping[Any, Any]:
    """The running replicas as Serve's request router in this process knows them."""
    request_router = handle._router._asyncio_router._request_router
    return _NO_REPLICAS if request_router is None else request_router.curr_replicas
