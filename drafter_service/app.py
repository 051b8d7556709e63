"""The Drafter as a Ray Serve application: `import_path: drafter_service.app:build`.

Serve places, restarts and names the replica and tells verifiers where it listens; drafts go over
the replica's own gRPC server, which Serve never sees.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from cluster.collector import spare_what_is_loaded
from cluster.config import DrafterConfig
from cluster.membership import (
    DEPLOYMENT_OPTIONS,
    bind_host,
    member_metadata,
    replica_labels,
    this_replica,
)
from drafter_service.service import DrafterService


class DrafterReplica:
    """One replica: the service, and what Serve asks of it."""

    async def __init__(self, config: DrafterConfig) -> None:  # type: ignore[misc]  # Serve awaits it.
        self._config = config
        self._service = await DrafterService.start(
            config, host=bind_host(config.rpc), labels=replica_labels()
        )
        spare_what_is_loaded()

    def record_replica_metadata(self) -> dict[str, Any]:
        service = self._service
        return member_metadata(this_replica(service.incarnation, service.address, service.name))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve sees no draft traffic, so the policy is told."""
        return self._service.autoscaling_stats()

    async def wake(self) -> None:
        """What a verifier calls that wants a drafter while there is none: the call waits for a
        replica, which the autoscaling policy sees."""

    async def check_health(self) -> None:
        self._service.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_service"):
            await self._service.stop(grace_s=self._config.drain_grace_s)


Drafter = serve.deployment(
    DrafterReplica,
    name="Drafter",
    max_ongoing_requests=1_000,
    **DEPLOYMENT_OPTIONS,
)


def build(args: dict[str, Any]) -> serve.Application:
    """Serve's application builder; `args` is the application's `args:` in the Serve YAML."""
    return Drafter.bind(DrafterConfig.model_validate(args))
