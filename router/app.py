"""The Router as a Ray Serve application: `import_path: router.app:build`.

Serve's HTTP proxy hands requests to the replica; the model's card comes from a verifier over its
handle, and who is there from Serve's broadcast. Everything else is router/service.py and api.py.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import FastAPI
from ray import serve

from cluster.collector import spare_what_is_loaded
from cluster.config import RouterConfig
from cluster.membership import (
    DEPLOYMENT_OPTIONS,
    MemberWatch,
    bind_host,
    member_metadata,
    replica_labels,
    this_replica,
)
from cluster.rpc import new_incarnation
from cluster.types import Members
from router.api import create_app
from router.service import RouterService

logger = logging.getLogger("ray.serve")

_RETRY_S = 0.5


@serve.ingress()
class RouterReplica:
    """One replica: the service, fed with what Serve knows."""

    async def __init__(self, config: RouterConfig) -> None:  # type: ignore[misc]  # Serve awaits it.
        labels = replica_labels()
        self._service = RouterService(
            config, identity=this_replica(new_incarnation()), labels=labels
        )
        await self._service.listen(bind_host(config.rpc))
        self._service.start()
        self._fingerprint = ""
        self._verifiers_changed = asyncio.Event()
        self._verifiers = MemberWatch("Verifier", config.verifier_app, self._update_verifiers)
        self._drafters = MemberWatch("Drafter", config.drafter_app, self._service.update_drafters)
        self._routers = MemberWatch(
            labels.deployment, labels.application, self._service.update_routers
        )
        self._learning = asyncio.create_task(self._learn_model())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._service, echo_request_id=False)

    def record_replica_metadata(self) -> dict[str, Any]:
        return member_metadata(self._service.identity)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's `user_config`: sections of RouterConfig that change without a restart."""
        self._service.reconfigure(self._service.config.merged(user_config))

    async def __del__(self) -> None:
        if hasattr(self, "_learning"):
            self._service.draining = True
            self._learning.cancel()
            self._verifiers.close()
            self._drafters.close()
            self._routers.close()
            await self._service.close()

    def _update_verifiers(self, members: Members) -> None:
        self._service.update_members(members)
        self._verifiers_changed.set()

    async def _learn_model(self) -> None:
        """Serve the model that the verifiers hold; another one only when none holds it any more."""
        while True:
            await self._verifiers_changed.wait()
            self._verifiers_changed.clear()
            held = {member.fingerprint for member in self._service.pool.members.values()}
            if not held or self._fingerprint in held:
                continue
            try:
                verifiers = await self._verifiers.handle()
                card = await verifiers.model_card.remote()
            except Exception:
                logger.exception("a verifier did not tell its model; trying again")
                await asyncio.sleep(_RETRY_S)
                self._verifiers_changed.set()
                continue
            self._fingerprint = card.fingerprint
            self._service.serve_model(card)
            spare_what_is_loaded()


Router = serve.deployment(
    RouterReplica,
    name="Router",
    max_ongoing_requests=10_000,  # The router's own admission refuses in OpenAI's shape.
    **DEPLOYMENT_OPTIONS,
)


def build(args: dict[str, Any]) -> serve.Application:
    """Serve's application builder; `args` is the application's `args:` in the Serve YAML."""
    return Router.bind(RouterConfig.model_validate(args))
