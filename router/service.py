"""The router without HTTP: takes valid requests, gives running replies."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from cluster.config import RouterConfig
from cluster.errors import OverloadedError
from cluster.member_auth import MemberAuth, Role
from cluster.members_service import SERVICE_NAME, MembersServicer, RouterStatus
from cluster.metrics import MemberLabels
from cluster.rpc import RpcServer, new_incarnation, start_rpc_server
from cluster.types import (
    GenerationRequest,
    Member,
    ModelCard,
    Path,
    make_request_key,
)
from router.admission import Admission
from router.api_keys import ANYONE, ApiKeys, Tenant
from router.choice import Choice, ChoiceText, SpeculationTally
from router.cluster_scrape import ClusterScrape, Peer
from router.generation import Generation
from router.generation_client import Clock
from router.metrics import RequestMetrics, router_metrics_text
from router.path_policy import (
    PathDecision,
    PathPolicy,
    PathReason,
    SpeculationMode,
    with_probes,
)
from router.plan import (
    GenerationPlan,
    Prompt,
    num_generations,
    plan_chat,
    plan_completion,
)
from router.reply import Reply
from router.schema import ChatCompletionRequest, CompletionRequest, SamplingFields
from router.served_model import ServedModel
from router.thinking import ReasoningCounter
from router.verifier_pool import NOT_READY_RETRY_S, VerifierPool
from router.verifier_routing import prompt_affinity

POLICY_TICK_S = 0.1
INLINE_CHARS = 16_384
"""Longer requests are tokenized beside the event loop."""


class RouterService:
    """Everything a router does, for one model at a time.

    Made, started and fed with members inside one running event loop. It is ready once it has a
    model card and a verifier of that model.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        card: ModelCard | None = None,
        identity: Member | None = None,
        labels: MemberLabels | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`labels` are those of its metrics; by default its incarnation."""
        self.config = config
        self.identity = identity or Member(incarnation=new_incarnation(), address="")
        self.auth = MemberAuth(config.rpc)
        self._keys = ApiKeys(config.auth.keys_file) if config.auth.keys_file else None
        self.pool = VerifierPool(self.identity.incarnation, clock, self.auth)
        self.policy = PathPolicy(config.path_policy, clock())
        self.admission = Admission(config.admission)
        self.labels = labels or MemberLabels("Router", self.identity.incarnation)
        self.requests = RequestMetrics()
        self.scrape = ClusterScrape(self.metrics_text, self._peers, self.auth, clock)
        self.routers: dict[str, Member] = {}
        """Of this application, perhaps this one too."""
        self.drafters: dict[str, Member] = {}
        self.totals = SpeculationTally()
        """Over all requests that ended."""
        self.draining = False
        self.clock = clock
        self._model: ServedModel | None = None
        self._auto: dict[Reply, None] = {}
        """Running replies whose path follows the cluster's mode, in order of age."""
        self._numbers = itertools.count()
        self._ticking: asyncio.Task[None] | None = None
        self._rpc: RpcServer | None = None
        if card is not None:
            self.serve_model(card)

    # --- what the application feeds ---

    def serve_model(self, card: ModelCard) -> None:
        """Serve this model from now on; requests that run finish with the one they have."""
        if self._model is not None:
            asyncio.get_running_loop().run_in_executor(None, self._model.grammar_checker.close)
        self._model = ServedModel(card)
        self.pool.serve(card.fingerprint)

    def update_members(self, members: Mapping[str, Member]) -> None:
        """Take the verifiers that the cluster has now, by incarnation."""
        self.pool.update_members(members)

    def update_drafters(self, members: Mapping[str, Member]) -> None:
        """Take the drafters that the cluster has now; for the cluster report and metrics only."""
        self.drafters = dict(members)

    def update_routers(self, members: Mapping[str, Member]) -> None:
        """Take the routers that the cluster has now; for the cluster report and metrics only."""
        self.routers = dict(members)

    def reconfigure(self, config: RouterConfig) -> None:
        """Take other limits, thresholds and mode without a restart."""
        self.config = config
        self.policy.reconfigure(config.path_policy)
        self.admission.reconfigure(config.admission)

    def start(self) -> None:
        """Begin to follow the cluster's load."""
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())

    async def listen(self, host: str) -> None:
        """Answer other routers from now on, at the address in `identity`."""
        servicer = MembersServicer(self.metrics_text, self.status)
        self._rpc = await start_rpc_server(
            servicer.register, SERVICE_NAME, host=host, port=self.config.rpc.port, auth=self.auth
        )
        self.identity = replace(self.identity, address=self._rpc.address)

    async def close(self) -> None:
        """End every stream. Idempotent."""
        if self._rpc is not None:
            await self._rpc.stop(grace_s=0)
        await self.scrape.close()
        if self._ticking is not None:
            self._ticking.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticking
        await self.pool.close()
        if self._model is not None:
            await asyncio.to_thread(self._model.grammar_checker.close)

    # --- what the API asks ---

    def authenticate(self, authorization: str | None) -> Tenant:
        """Who shows this Authorization header. Raises AuthenticationError; without keys it is
        not looked at."""
        return ANYONE if self._keys is None else self._keys.authenticate(authorization)

    def metrics_text(self) -> str:
        """The exposition of this router alone."""
        return router_metrics_text(
            self.labels, self.requests, self.policy, self.pool.num_resumes, self.scrape.errors
        )

    def status(self) -> RouterStatus:
        """What this router tells of itself."""
        return RouterStatus(
            ready=self.not_ready_reason is None,
            in_flight=self.admission.in_flight,
            mode=self.policy.mode,
            reason=self.policy.reason,
            since_s=self.policy.since_s(self.clock()),
        )

    @property
    def not_ready_reason(self) -> str | None:
        """Why requests are refused now, None if they are taken."""
        if self.draining:
            return "this router is draining"
        if self._model is None:
            return "the model's card is not here yet"
        return None if self.pool.ready else self.pool.describe()

    @property
    def model(self) -> ServedModel:
        """The model served. Raises OverloadedError before there is one."""
        if self._model is None:
            raise self._not_ready("the model's card is not here yet")
        return self._model

    @asynccontextmanager
    async def chat(
        self,
        request: ChatCompletionRequest,
        tenant: Tenant = ANYONE,
        session: str | None = None,
    ) -> AsyncIterator[Reply]:
        """A running chat completion; leaving the context frees everything it holds."""
        size = sum(len(message.text or "") for message in request.messages)
        limits, model = self.config.limits, self.model
        call_format = self.config.tool_call_format
        async with self._reply(
            model,
            request,
            lambda: plan_chat(model, limits, request, call_format),
            size,
            tenant,
            session,
        ) as reply:
            yield reply

    @asynccontextmanager
    async def completion(
        self,
        request: CompletionRequest,
        tenant: Tenant = ANYONE,
        session: str | None = None,
    ) -> AsyncIterator[Reply]:
        """A running completion; leaving the context frees everything it holds."""
        prompt = request.prompt
        size = len(prompt) if isinstance(prompt, str) else sum(len(str(p)) for p in prompt)
        limits, model = self.config.limits, self.model
        async with self._reply(
            model, request, lambda: plan_completion(model, limits, request), size, tenant, session
        ) as reply:
            yield reply

    # --- one reply ---

    @asynccontextmanager
    async def _reply(
        self,
        model: ServedModel,
        request: SamplingFields,
        make_plan: Callable[[], GenerationPlan],
        num_chars: int,
        tenant: Tenant,
        session: str | None,
    ) -> AsyncIterator[Reply]:
        started = self.clock()
        model.check_name(request.model)
        count = num_generations(request, self.config.limits)
        if self.not_ready_reason is not None:
            raise self._not_ready(self.not_ready_reason)
        left_s = self.config.request_timeout_s - (self.clock() - started)
        with self.admission.slots(count, tenant, self.pool.outlook(), left_s):
            inline = num_chars < INLINE_CHARS and not request.is_constrained
            plan = make_plan() if inline else await asyncio.to_thread(make_plan)
            plan = replace(plan, cache_salt=tenant.cache_salt(plan.cache_salt))
            reply = self._start(model, plan, started, session)
            try:
                yield reply
            finally:
                self._auto.pop(reply, None)
                reply.close()
                self.totals.add(reply.tally())

    def _start(
        self, model: ServedModel, plan: GenerationPlan, started: float, session: str | None
    ) -> Reply:
        """Submit every generation of a plan; on an error none of them stays."""
        decision = self._decide(plan)
        reply = Reply(model, plan, decision, started)
        secret = secrets.token_bytes(16) if plan.seed is None else str(plan.seed).encode()
        number = next(self._numbers)
        try:
            for index in range(len(plan.prompts) * plan.num_choices):
                prompt = plan.prompts[index // plan.num_choices]
                key = make_request_key(secret, index % plan.num_choices, prompt.token_ids)
                request_id = f"{self.identity.incarnation[:12]}-{number:x}-{index}"
                request = self._request(plan, prompt, request_id, key, decision, started)
                salt = plan.cache_salt
                affinity = (session or "").encode() or prompt_affinity(prompt.token_ids, salt)
                generation = Generation(self.pool, request, affinity, self.config.max_resumes)
                text = ChoiceText(
                    model.tokenizer.detokenizer(),
                    plan.stops,
                    _silent_ids(model.card, plan),
                    plan.sampling.min_tokens,
                )
                reasoning = ReasoningCounter(plan.form.thinking, model.tokenizer)
                reply.choices.append(Choice(index, generation, text, reasoning))
        except BaseException:
            reply.close()
            raise
        if plan.mode is SpeculationMode.AUTO and decision.follows_load:
            self._auto[reply] = None
        return reply

    def _request(
        self,
        plan: GenerationPlan,
        prompt: Prompt,
        request_id: str,
        key: int,
        decision: PathDecision,
        started: float,
    ) -> GenerationRequest:
        left_s = self.config.request_timeout_s - (self.clock() - started)
        return GenerationRequest(
            request_id=request_id,
            request_key=key,
            prompt_ids=prompt.token_ids,
            sampling=plan.sampling,
            num_top_logprobs=plan.num_top_logprobs,
            num_prompt_logprobs=plan.num_prompt_logprobs,
            grammar=plan.grammar,
            max_tokens=prompt.max_tokens,
            stop_token_ids=plan.stop_token_ids,
            ignore_eos=plan.ignore_eos,
            path=decision.path,
            num_speculative_tokens=plan.num_speculative_tokens,
            drafter=plan.drafter,
            prediction_ids=prompt.prediction_ids,
            deadline_ms=max(1, int(left_s * 1000)),
            cache_salt=plan.cache_salt,
            priority=plan.priority,
        )

    def _not_ready(self, reason: str) -> OverloadedError:
        return OverloadedError(reason, code="not_ready", retry_after_s=NOT_READY_RETRY_S)

    # --- the cluster's mode ---

    def _peers(self) -> list[Peer]:
        """Every other member of the cluster."""
        own = self.identity.incarnation
        routers = [Peer(Role.ROUTER, m) for name, m in self.routers.items() if name != own]
        verifiers = [Peer(Role.VERIFIER, member) for member in self.pool.members.values()]
        drafters = [Peer(Role.DRAFTER, member) for member in self.drafters.values()]
        return [*routers, *verifiers, *drafters]

    async def _tick(self) -> None:
        while True:
            self.follow_load()
            if self._keys is not None:
                self._keys.refresh(self.clock())
            await asyncio.sleep(POLICY_TICK_S)

    def follow_load(self) -> None:
        """Let the policy see the load; running auto requests follow a switch of the mode."""
        if not self.policy.observe(self.pool.load(), self.clock()):
            return
        replies = list(self._auto)
        modes = [self.policy.of_tier(reply.plan.tier) for reply in replies]
        for reply, decision in zip(replies, with_probes(modes), strict=True):
            if decision.path is not reply.decision.path:
                reply.set_decision(decision)

    def _decide(self, plan: GenerationPlan) -> PathDecision:
        self.follow_load()
        predicted = any(prompt.prediction_ids for prompt in plan.prompts)
        if plan.drafter == "prediction" and plan.mode is not SpeculationMode.OFF and not predicted:
            reason = "speculation.drafter is prediction, and the request has none"
            return PathDecision(Path.PLAIN, reason, PathReason.NO_PREDICTION)
        load, now = self.pool.load(), self.clock()
        decision = self.policy.decide(load, plan.mode, now, plan.drafter, plan.tier)
        if plan.mode is not SpeculationMode.AUTO:
            return decision
        speculating = sum(r.decision.path is Path.SPECULATIVE for r in self._auto)
        return with_probes([decision], len(self._auto), speculating)[0]


def _silent_ids(card: ModelCard, plan: GenerationPlan) -> frozenset[int]:
    """Ids that end a generation; their text is not shown."""
    eos = () if plan.ignore_eos else card.eos_token_ids
    return plan.stop_token_ids.union(eos)
