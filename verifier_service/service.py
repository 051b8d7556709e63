"""A verifier as a whole, without Ray: model, engine thread, generation server, draft client."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc

from cluster.config import VerifierConfig
from cluster.errors import InternalError, InvalidRequestError
from cluster.load import VerifierLoad
from cluster.member_auth import MemberAuth
from cluster.members_service import MembersServicer
from cluster.metrics import MemberLabels
from cluster.protocol import generation_pb2, generation_pb2_grpc
from cluster.protocol.messages import TargetHello
from cluster.rpc import RpcServer, new_incarnation, start_rpc_server
from cluster.types import Members
from engine.loader import load_model
from engine.model_runner import ModelRunner
from verifier_service.draft_client import LEASE_S, DraftClient
from verifier_service.engine import Engine
from verifier_service.events import EngineOutput, Reconfigured
from verifier_service.grammars import Grammars
from verifier_service.grpc_network import GrpcNetwork
from verifier_service.metrics import VerifierMetrics
from verifier_service.planner import StepProfile
from verifier_service.servicer import GenerationServicer
from verifier_service.step_profile import kept_profile

_SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
_STOP_TIMEOUT_S = 5.0


class VerifierService:
    """Lives on one event loop; the engine has a thread of its own. Made by :meth:`start`."""

    def __init__(
        self,
        config: VerifierConfig,
        runner: ModelRunner,
        profile: StepProfile | None,
        labels: MemberLabels | None = None,
    ) -> None:
        self.card = runner.card
        self.incarnation = new_incarnation()
        self.config = config
        self._loop = asyncio.get_running_loop()
        self._engine = Engine(runner, config.scheduler, config.speculation, self._post, profile)
        hello = TargetHello(
            self.incarnation, self.card.name, self.card.vocabulary, int(1e3 * LEASE_S)
        )
        self._auth = MemberAuth(config.rpc)
        self._draft_client = DraftClient(
            config.speculation, hello, self._engine.inbox.put, GrpcNetwork(hello, self._auth)
        )
        self._grammars = Grammars(self.card)
        self._servicer = GenerationServicer(
            self.card,
            self.incarnation,
            self._engine.inbox.put,
            self.load,
            self._grammars.compile,
        )
        self.metrics = VerifierMetrics(
            labels or MemberLabels("Verifier", self.incarnation),
            self._engine,
            self._draft_client,
            self._servicer,
            config.speculation.num_speculative_tokens,
        )
        self._rpc: RpcServer | None = None

    @classmethod
    async def start(
        cls, config: VerifierConfig, *, host: str, labels: MemberLabels | None = None
    ) -> VerifierService:
        """Load and warm the model, then listen. Takes as long as the model takes to load. `labels`
        are those of its metrics; by default its incarnation."""
        service = cls(config, *await asyncio.to_thread(_load, config), labels)
        service._engine.start()
        service._rpc = await start_rpc_server(
            service._register,
            _SERVICE_NAME,
            host=host,
            port=config.rpc.port,
            auth=service._auth,
        )
        return service

    def _register(self, server: grpc.aio.Server) -> None:
        add = generation_pb2_grpc.add_GenerationServicer_to_server
        add(self._servicer, server)  # type: ignore[no-untyped-call]
        MembersServicer(self.metrics.text).register(server)

    @property
    def address(self) -> str:
        assert self._rpc is not None
        return self._rpc.address

    def update_drafters(self, members: Members) -> None:
        """The drafters that may be used from now on. Call on the loop."""
        self._draft_client.update_members(members)

    def reconfigure(self, config: VerifierConfig) -> None:
        """Take other limits, depth and deadline without a restart. Raises InvalidRequestError if
        anything else differs."""
        now = self.config.speculation
        fixed = {name: getattr(now, name) for name in ("planner", "local_drafters", "suffix")}
        speculation = config.speculation.model_copy(update=fixed)
        changed = {"scheduler": config.scheduler, "speculation": config.speculation}
        if config != self.config.model_copy(update=changed) or speculation != config.speculation:
            raise InvalidRequestError(
                "user_config of the Verifier may hold scheduler, and speculation without planner, "
                "local_drafters and suffix",
                param="user_config",
            )
        self.config = config
        self._engine.inbox.put(Reconfigured(config.scheduler, config.speculation))

    def load(self) -> VerifierLoad:
        return dataclasses.replace(self._engine.load(), drafters=self._draft_client.loads())

    def autoscaling_stats(self) -> dict[str, float]:
        """The load as flat figures."""
        load = self._engine.load()
        return {
            "running": float(load.running),
            "waiting": float(load.waiting),
            "kv_usage": load.kv_blocks_used / load.kv_blocks_total,
            "step_ms": load.step_ms,
            "knee_tokens": float(load.knee_tokens),
            "max_running": float(load.max_running),
            "queue_s": load.waiting * load.place_s / max(1, load.running),
        }

    @property
    def lacks_drafters(self) -> bool:
        """Sequences want drafts of a drafter replica, and there is none at all."""
        return self._draft_client.lacks_drafters

    def check_health(self) -> None:
        """Raise InternalError if the engine has ended, or if work waits and it does not step."""
        if not self._engine.alive:
            raise InternalError("the engine's thread has ended; its log says why")
        stalled_s = self._engine.stalled_for_s()
        if stalled_s > self.config.stall_timeout_s:
            raise InternalError(f"the engine has not stepped for {stalled_s:.0f} s")

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, let what runs finish within `grace_s`, then free everything."""
        assert self._rpc is not None
        await self._servicer.drain(grace_s)
        await self._rpc.stop(grace_s=0)
        await self._draft_client.close()
        await asyncio.to_thread(self._engine.stop, _STOP_TIMEOUT_S)
        await asyncio.to_thread(self._grammars.close)

    def _post(self, output: EngineOutput) -> None:
        """Called by the engine's thread."""
        self._loop.call_soon_threadsafe(self._deliver, output)

    def _deliver(self, output: EngineOutput) -> None:
        self._servicer.deliver(output.events)
        self._draft_client.apply(output.orders)
        for verdict in output.verdicts:
            self._draft_client.record(verdict)


def _load(config: VerifierConfig) -> tuple[ModelRunner, StepProfile | None]:
    """The model, warm, and what its steps cost if that is to be planned with."""
    runner = ModelRunner(load_model(config.model), config.kv_cache)
    runner.warm_up()
    planned = config.speculation.planner == "goodput"
    return runner, kept_profile(runner, config.model.num_threads) if planned else None
