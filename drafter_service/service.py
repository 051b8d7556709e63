"""A drafter as a whole, without Ray: sessions, scheduler and servicer put together."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from cluster.config import DrafterConfig
from cluster.errors import InternalError
from cluster.member_auth import MemberAuth
from cluster.members_service import MembersServicer
from cluster.metrics import MemberLabels
from cluster.protocol import drafting_pb2, drafting_pb2_grpc
from cluster.protocol.messages import DrafterHello, DrafterReport
from cluster.rpc import RpcServer, new_incarnation, start_rpc_server
from drafter_service.metrics import DrafterMetrics
from drafter_service.scheduler import DraftLoop, Limits
from drafter_service.servicer import DraftingServicer
from drafter_service.session import SessionTable
from engine.drafting.interface import Drafter
from engine.drafting.ngram import NgramDrafter
from engine.drafting.suffix import SuffixDrafter

_SERVICE_NAME = drafting_pb2.DESCRIPTOR.services_by_name["Drafting"].full_name
_END_GRACE_S = 1.0
"""Time for streams to end by themselves once they were told to."""
_STALL_TIMEOUT_S = 60.0
"""Health fails when one round takes longer."""


class DrafterService:
    """Lives on one event loop; the drafter has a thread of its own. Listens once, stops once."""

    def __init__(
        self,
        config: DrafterConfig,
        drafter: Drafter,
        *,
        name: str,
        vocabulary: str = "",
        max_context_len: int = 0,
        incarnation: str | None = None,
        labels: MemberLabels | None = None,
    ) -> None:
        """`name`, `vocabulary` and `max_context_len` are told in the hello; see DrafterHello.
        `labels` are those of its metrics; by default its incarnation."""
        self.name = name
        self.incarnation = incarnation or new_incarnation()
        hello = DrafterHello(
            incarnation=self.incarnation,
            drafter=name,
            vocabulary=vocabulary,
            max_sessions=config.max_sessions,
            max_speculative_tokens=config.max_speculative_tokens,
            max_context_len=max_context_len,
            kind=config.kind,
            tells_laws=config.kind == "model",
        )
        self._table = SessionTable(config.max_sessions, config.session_ttl_s, max_context_len)
        limits = Limits(config.max_speculative_tokens, config.ahead)
        self._draft_loop = DraftLoop(self._table, drafter, limits)
        self._servicer = DraftingServicer(hello, self._table, self._draft_loop)
        self.metrics = DrafterMetrics(
            labels or MemberLabels("Drafter", self.incarnation), self._table
        )
        self._auth = MemberAuth(config.rpc)
        self._rpc: RpcServer | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: DrafterConfig,
        *,
        host: str,
        incarnation: str | None = None,
        labels: MemberLabels | None = None,
    ) -> DrafterService:
        """The drafter that the configuration names, listening. Takes as long as its model takes to
        load, if it has one."""
        if config.kind == "model":
            service = await cls._of_model(config, incarnation, labels)
        else:
            drafter = _without_model(config)
            service = cls(config, drafter, name=config.kind, incarnation=incarnation, labels=labels)
        await service.listen(host, config.rpc.port)
        return service

    @classmethod
    async def _of_model(
        cls, config: DrafterConfig, incarnation: str | None, labels: MemberLabels | None
    ) -> DrafterService:
        # Here, because it brings torch and transformers, which the other drafters do without.
        from drafter_service.model_drafter import ModelDrafter

        assert config.model is not None
        drafter = await asyncio.to_thread(
            ModelDrafter.load, config.model, config.kv_cache, config.max_step_tokens
        )
        return cls(
            config,
            drafter,
            name=drafter.name,
            vocabulary=drafter.vocabulary,
            max_context_len=drafter.max_context_len,
            incarnation=incarnation,
            labels=labels,
        )

    async def listen(self, host: str, port: int = 0) -> None:
        """Serve from now on, at `address`."""
        self._task = asyncio.create_task(self._draft_loop.run(self._servicer.deliver))
        self._rpc = await start_rpc_server(
            self._register,
            _SERVICE_NAME,
            host=host,
            port=port,
            auth=self._auth,
        )

    def _register(self, server: grpc.aio.Server) -> None:
        add = drafting_pb2_grpc.add_DraftingServicer_to_server
        add(self._servicer, server)  # type: ignore[no-untyped-call]
        MembersServicer(self.metrics.text).register(server)

    @property
    def address(self) -> str:
        assert self._rpc is not None
        return self._rpc.address

    @property
    def num_sessions(self) -> int:
        return len(self._table)

    @property
    def num_session_errors(self) -> dict[str, int]:
        """Errors told to verifiers, by kind."""
        return dict(self._table.num_errors)

    def report(self) -> DrafterReport:
        return self._draft_loop.report()

    def autoscaling_stats(self) -> dict[str, float]:
        """The report as flat figures."""
        report = self.report()
        return {
            "sessions": float(report.sessions),
            "active_sessions": float(self._table.num_active),
            "tokens_per_s": report.tokens_per_s,
            "queue_ms": report.queue_ms,
            "num_branches": float(report.num_branches),
        }

    def check_health(self) -> None:
        """Raise InternalError if drafting is stuck or its loop has ended."""
        if self._task is None or self._task.done():
            raise InternalError("the drafting loop does not run")
        stalled_s = self._draft_loop.stalled_for_s()
        if stalled_s > _STALL_TIMEOUT_S:
            raise InternalError(f"a round of drafting has taken {stalled_s:.0f} s")

    async def stop(self, grace_s: float) -> None:
        """Drain: take nothing new, serve what is open for at most `grace_s`, then end all."""
        assert self._rpc is not None
        assert self._task is not None
        self._servicer.drain()
        await self._rpc.health.enter_graceful_shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._draft_loop.wait_until_unused()
        self._servicer.end_streams()
        await self._rpc.stop(_END_GRACE_S)
        self._task.cancel()
        await asyncio.wait([self._task], timeout=_END_GRACE_S)


def _without_model(config: DrafterConfig) -> Drafter:
    if config.kind == "suffix":
        return SuffixDrafter(**config.suffix.model_dump())
    return NgramDrafter(**config.ngram.model_dump())
