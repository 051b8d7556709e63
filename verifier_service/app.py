"""The Verifier as a Ray Serve application: `import_path: verifier_service.app:build`.

Serve places, restarts and names the replica and tells the others where it listens; tokens go over
the replica's own gRPC server.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from cluster.collector import spare_what_is_loaded
from cluster.config import VerifierConfig
from cluster.membership import (
    DEPLOYMENT_OPTIONS,
    MemberWatch,
    bind_host,
    member_metadata,
    replica_labels,
    this_replica,
)
from cluster.types import ModelCard
from verifier_service.drafter_wake import DrafterWake
from verifier_service.service import VerifierService


class VerifierReplica:
    """One replica: the service, and what Serve asks of it."""

    async def __init__(self, config: VerifierConfig) -> None:  # type: ignore[misc]  # Serve awaits it.
        self._config = config
        self._service = await VerifierService.start(
            config, host=bind_host(config.rpc), labels=replica_labels()
        )
        spare_what_is_loaded()
        self._drafters = MemberWatch("Drafter", config.drafter_app, self._service.update_drafters)
        self._wake = DrafterWake(lambda: self._service.lacks_drafters, self._call_drafter)

    async def _call_drafter(self) -> None:
        handle = await self._drafters.handle()
        await handle.wake.remote()

    def record_replica_metadata(self) -> dict[str, Any]:
        service, card = self._service, self._service.card
        return member_metadata(
            this_replica(
                service.incarnation, service.address, card.name, card.fingerprint, card.decoder
            )
        )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's `user_config`: the sections of VerifierConfig that change without a restart."""
        self._service.reconfigure(self._service.config.merged(user_config))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve sees no token traffic, so the policy is told."""
        return self._service.autoscaling_stats()

    async def model_card(self) -> ModelCard:
        """What a router must know of the model."""
        return self._service.card

    async def check_health(self) -> None:
        self._service.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_wake"):
            self._wake.close()
            self._drafters.close()
            await self._service.stop(grace_s=self._config.drain_grace_s)


Verifier = serve.deployment(
    VerifierReplica,
    name="Verifier",
    max_ongoing_requests=1_000,
    **DEPLOYMENT_OPTIONS,
)


def build(args: dict[str, Any]) -> serve.Application:
    """Serve's application builder; `args` is the application's `args:` in the Serve YAML."""
    return Verifier.bind(VerifierConfig.model_validate(args))
