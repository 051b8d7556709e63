"""The Verifier as a Ray Serve application: `import_path: verifier_service.app:build`.

Serve places, restarts and names the replica and tells the others where it listens; tokens go over
the replica's own gRPC server.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from ray import serve

from cluster.config import VerifierConfig
from cluster.membership import (
    MemberWatch,
    bind_host,
    member_metadata,
)
from cluster.types import Member, ModelCard
from verifier_service.service import VerifierService


class VerifierReplica:
    """One replica: the service, and what Serve asks of it."""

    async def __init__(self, config: VerifierConfig) -> None:  # type: ignore[misc]  # Serve awaits it.
        self._config = config
        self._service = await VerifierService.start(config, host=bind_host(config.rpc))
        self._drafters = MemberWatch("Drafter", config.drafter_app, self._service.update_drafters)

    def record_replica_metadata(self) -> dict[str, Any]:
        context = serve.get_replica_context()
        return member_metadata(
            Member(
                incarnation=self._service.incarnation,
                address=self._service.address,
                replica_id=context.replica_id.unique_id,
                node_id=ray.get_runtime_context().get_node_id(),
                pid=os.getpid(),
                model=self._service.card.name,
                fingerprint=self._service.card.fingerprint,
            )
        )

    async def model_card(self) -> ModelCard:
        """What a router must know of the model."""
        return self._service.card

    async def check_health(self) -> None:
        self._service.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_drafters"):
            self._drafters.close()
            await self._service.stop(grace_s=self._config.drain_grace_s)


Verifier = serve.deployment(
    VerifierReplica,
    name="Verifier",
    max_ongoing_requests=1_000,
    health_check_period_s=5,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=20,
    graceful_shutdown_wait_loop_s=0.1,
)


def build(args: dict[str, Any]) -> serve.Application:
    """Serve's application builder; `args` is the application's `args:` in the Serve YAML."""
    return Verifier.bind(VerifierConfig.model_validate(args))
