"""Which sessions are drafted for next, and the one thread that does it.

A round is everything the drafter is asked at once: what changed since the last round, then one
batched draft over sessions of all streams. While a round computes, the event loop takes messages;
several commits of one session that come meanwhile are answered by one draft, from the newest.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, zip_longest

from cluster.protocol.messages import DrafterReport, SessionDraft, SessionError
from cluster.types import Draft, DraftNode
from drafter_service.session import Begin, DrafterOperation, Extend, Session, SessionTable
from engine.drafting.interface import Drafter, DraftRequest

logger = logging.getLogger(__name__)

MAX_ROUND_SESSIONS = 64
"""Sessions in one draft call; the others wait for the next round."""
MAX_PENDING_OPERATIONS = 8_192
"""Untold operations beyond which no more messages are read, so that a stuck drafter costs no
memory."""
EXPIRY_PERIOD_S = 1.0
AVERAGE_WINDOW_S = 1.0

Deliver = Callable[[int, Sequence[SessionDraft], Sequence[SessionError]], None]
"""(stream, its drafts, its errors) of one round."""


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of the compute thread. Index i of the last three fields is one draft."""

    operations: tuple[DrafterOperation, ...]
    """To be told to the drafter first."""
    requests: tuple[DraftRequest, ...]
    anchors: tuple[Draft, ...]
    """Empty drafts at the last token that each session had when the round was planned."""
    queue_s: float
    """Longest wait among them."""


def plan_round(table: SessionTable, max_sessions: int, max_tokens: int, now: float) -> Round:
    """Take the next round's work out of the table."""
    chosen = fair_order(table.owing, max_sessions)
    for session in chosen:
        table.answer(session)
    requests = tuple(
        DraftRequest(s.session_key, min(max_tokens, s.num_speculative_tokens)) for s in chosen
    )
    anchors = tuple(Draft(len(s.token_ids), s.prefix_hash) for s in chosen)
    queue_s = max((now - s.owed_since for s in chosen), default=0.0)
    return Round(table.take_operations(), requests, anchors, queue_s)


def fair_order(sessions: Iterable[Session], limit: int) -> list[Session]:
    """At most `limit` sessions, one of each stream in turn, the longest waiting first."""
    by_stream: dict[int, list[Session]] = defaultdict(list)
    for session in sessions:
        by_stream[session.stream].append(session)
    turns = zip_longest(*by_stream.values())
    return list(islice((s for turn in turns for s in turn if s is not None), limit))


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What came of a round, by session key."""

    nodes: dict[int, tuple[DraftNode, ...]]
    failures: dict[int, str]


def run_round(drafter: Drafter, work: Round) -> RoundResult:
    """Ask the drafter; for the compute thread. One session's failure is that session's alone."""
    failures: dict[int, str] = {}
    for operation in work.operations:
        key = operation.session_key
        if key not in failures:
            try:
                _tell(drafter, operation)
            except Exception as error:  # noqa: BLE001  a drafter may raise anything
                failures[key] = repr(error)
    requests = [r for r in work.requests if r.session_key not in failures]
    try:
        nodes = _draft(drafter, requests)
    except Exception:
        logger.exception("a batch of %d drafts failed; drafting one by one", len(requests))
        nodes = {}
        for request in requests:
            try:
                nodes |= _draft(drafter, [request])
            except Exception as error:  # noqa: BLE001
                failures[request.session_key] = repr(error)
    return RoundResult(nodes, failures)


def _tell(drafter: Drafter, operation: DrafterOperation) -> None:
    if isinstance(operation, Begin):
        drafter.begin(operation.session)
    elif isinstance(operation, Extend):
        drafter.extend(operation.session_key, operation.token_ids)
    else:
        drafter.end(operation.session_key)


def _draft(drafter: Drafter, requests: Sequence[DraftRequest]) -> dict[int, tuple[DraftNode, ...]]:
    if not requests:
        return {}
    drafts = drafter.draft(requests)
    return {r.session_key: nodes for r, nodes in zip(requests, drafts, strict=True)}


@dataclass(slots=True)
class DraftingRate:
    """Moving figures of a drafter's work, over about AVERAGE_WINDOW_S."""

    _tokens_per_s: float = 0.0
    _queue_ms: float = 0.0
    _updated_at: float = 0.0

    def record(self, num_tokens: int, queue_s: float, now: float) -> None:
        """Count one round."""
        kept = self._kept(now)
        self._tokens_per_s = self._tokens_per_s * kept + num_tokens / AVERAGE_WINDOW_S
        self._queue_ms = self._queue_ms * kept + queue_s * 1e3 * (1.0 - kept)
        self._updated_at = now

    def report(self, num_sessions: int, now: float) -> DrafterReport:
        kept = self._kept(now)
        return DrafterReport(num_sessions, self._tokens_per_s * kept, self._queue_ms * kept)

    def _kept(self, now: float) -> float:
        return math.exp(-max(0.0, now - self._updated_at) / AVERAGE_WINDOW_S)


class DraftLoop:
    """Runs rounds as long as anything is to be done. Lives on the event loop."""

    def __init__(self, table: SessionTable, drafter: Drafter, max_tokens: int) -> None:
        self._table = table
        self._drafter = drafter
        self._max_tokens = max_tokens
        self._rate = DraftingRate()
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._unused = asyncio.Event()
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="draft")
        self._computing_since: float | None = None

    def wake(self) -> None:
        """The table has changed."""
        self._work.set()

    async def wait_for_room(self) -> None:
        """Return once the compute thread has caught up enough to take more messages."""
        while self._table.num_operations > MAX_PENDING_OPERATIONS:
            self._room.clear()
            await self._room.wait()

    async def wait_until_unused(self) -> None:
        """Return once no session is open."""
        while self._table:
            self._unused.clear()
            await self._unused.wait()

    def report(self) -> DrafterReport:
        return self._rate.report(len(self._table), time.monotonic())

    def stalled_for_s(self) -> float:
        """How long the round that runs now has taken."""
        return time.monotonic() - self._computing_since if self._computing_since else 0.0

    async def run(self, deliver: Deliver) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._wait_for_work()
                self._expire(deliver)
                work = self._plan()
                if work.operations or work.requests:
                    self._computing_since = time.monotonic()
                    result = await loop.run_in_executor(
                        self._compute, run_round, self._drafter, work
                    )
                    self._computing_since = None
                    self._finish(work, result, deliver)
        finally:
            self._compute.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_work(self) -> None:
        try:
            async with asyncio.timeout(EXPIRY_PERIOD_S):
                await self._work.wait()
        except TimeoutError:
            return

    def _expire(self, deliver: Deliver) -> None:
        for stream, error in self._table.expire(time.monotonic()):
            deliver(stream, (), (error,))

    def _plan(self) -> Round:
        now = time.monotonic()
        work = plan_round(self._table, MAX_ROUND_SESSIONS, self._max_tokens, now)
        if not any(self._table.owing):
            self._work.clear()
        self._room.set()
        if not self._table:
            self._unused.set()
        return work

    def _finish(self, work: Round, result: RoundResult, deliver: Deliver) -> None:
        drafts: dict[int, list[SessionDraft]] = defaultdict(list)
        errors: dict[int, list[SessionError]] = defaultdict(list)
        for anchor, request in zip(work.anchors, work.requests, strict=True):
            session = self._table.by_key(request.session_key)
            nodes = result.nodes.get(request.session_key)
            if session is not None and nodes is not None:
                draft = Draft(anchor.anchor_position, anchor.anchor_hash, nodes)
                drafts[session.stream].append(SessionDraft(session.number, session.epoch, draft))
        for session_key, message in result.failures.items():
            session = self._table.by_key(session_key)
            if session is not None:
                errors[session.stream].append(self._table.fail(session, message))
        num_tokens = sum(map(len, result.nodes.values()))
        self._rate.record(num_tokens, work.queue_s, time.monotonic())
        for stream in drafts.keys() | errors.keys():
            deliver(stream, drafts[stream], errors[stream])
