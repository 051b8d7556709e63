"""Which sessions are drafted for next, and the one thread that does it.

A round is everything the drafter is asked at once: what changed since the last round, then one
batched draft over sessions of all streams. Rounds are short, so that a message waits for little:
chains grow in each by as many tokens as take some milliseconds, and those are sent. While a round
computes, the event loop takes messages; several commits of one session that come meanwhile are
answered by one draft, from the newest.

When no session owes a draft, rounds go ahead of the verifiers: they make chains longer, on the
guess that all of them is accepted, and prepare the likely corrections.
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

from cluster.config import AheadConfig
from cluster.protocol.messages import DrafterReport, SessionError
from cluster.types import DraftNode
from drafter_service.proposal import Growth, chain_len
from drafter_service.session import Begin, DrafterOperation, Extend, Session, SessionTable
from engine.drafting.interface import Drafter, DraftRequest

logger = logging.getLogger(__name__)

MAX_ROUND_SESSIONS = 64
"""Sessions in one draft call; the others wait for the next round."""
ROUND_S = 0.010
"""How long a round shall take that makes drafts which are owed."""
AHEAD_ROUND_S = 0.005
"""How long one shall take that nobody waits for: who comes meanwhile does."""
MAX_ROUND_TOKENS = 64
MAX_BRANCH_ROUNDS = 6
"""For the branches of one chain. A round lasts as long as chains need: not all branches fit in."""
PACE_WEIGHT = 0.1
MIN_PACE_VARIANCE = 0.2
"""Of the tokens in a round; where all are alike they tell nothing."""
MAX_PENDING_OPERATIONS = 8_192
"""Untold operations beyond which no more messages are read, so that a stuck drafter costs no
memory."""
EXPIRY_PERIOD_S = 1.0
AVERAGE_WINDOW_S = 1.0

Deliver = Callable[[int, Sequence[SessionError]], None]
"""(stream, its errors): there is something to tell on a stream."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a round may ask for."""

    max_tokens: int
    """Longest chain that any verifier gets on demand."""
    ahead: AheadConfig
    max_sessions: int = MAX_ROUND_SESSIONS

    def wanted(self, session: Session) -> int:
        """Length of the chain that answers a message of this session."""
        return min(self.max_tokens, session.num_speculative_tokens)


class Pace:
    """How fast a drafter is: the time that one more token of all chains of a round takes, which is
    about a forward. The slope of a line through the rounds of late, so that what a round takes
    anyway does not count: a drafter without a model makes any number of tokens at once."""

    def __init__(self) -> None:
        self._token_s = 0.0025
        self._mean_tokens = self._mean_s = 0.0
        self._variance = self._covariance = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A round let its chains grow by so many tokens."""
        tokens_off, seconds_off = num_tokens - self._mean_tokens, seconds - self._mean_s
        self._mean_tokens += PACE_WEIGHT * tokens_off
        self._mean_s += PACE_WEIGHT * seconds_off
        kept = 1.0 - PACE_WEIGHT
        self._variance = kept * (self._variance + PACE_WEIGHT * tokens_off**2)
        self._covariance = kept * (self._covariance + PACE_WEIGHT * tokens_off * seconds_off)
        if self._variance > MIN_PACE_VARIANCE:
            self._token_s = self._covariance / self._variance

    def tokens_within(self, seconds: float) -> int:
        most = seconds / MAX_ROUND_TOKENS
        return max(1, round(seconds / max(most, self._token_s)))


@dataclass(frozen=True, slots=True)
class Task:
    """One session's part of a round."""

    request: DraftRequest
    num_committed: int
    """Tokens that the session had when the round was planned."""
    wanted: int
    """A chain this long is an answer."""
    owed: bool
    """The session owes an answer, and gives it or goes on owing."""


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of the compute thread."""

    operations: tuple[DrafterOperation, ...] = ()
    """To be told to the drafter first."""
    tasks: tuple[Task, ...] = ()
    num_tokens: int = 0
    """Most tokens that any chain or branch grows by."""
    queue_s: float = 0.0
    """Longest wait among those that are owed."""


def plan_round(table: SessionTable, limits: Limits, pace: Pace, now: float) -> Round:
    """Take the next round's work out of the table."""
    owing = fair_order(table.owing, limits.max_sessions)
    for session in owing:
        table.take(session)
    if owing:
        most = pace.tokens_within(ROUND_S)
        tasks = [_answer(table, session, limits, most) for session in owing]
    else:
        most = pace.tokens_within(AHEAD_ROUND_S)
        tasks = _tasks_ahead(table, limits, most)
    num_tokens = max((_growth(table, task) for task in tasks), default=0)
    queue_s = max((now - s.owed_since for s in owing), default=0.0)
    return Round(table.take_operations(), tuple(tasks), num_tokens, queue_s)


def _growth(table: SessionTable, task: Task) -> int:
    session = table.by_key(task.request.session_key)
    assert session is not None
    return task.request.num_tokens - session.proposal.chain_len


def _answer(table: SessionTable, session: Session, limits: Limits, most: int) -> Task:
    wanted, chain = limits.wanted(session), session.proposal.chain_len
    num_tokens = max(chain, min(wanted, chain + most))
    floor = table.least_survival(session)
    request = DraftRequest(session.session_key, num_tokens, least_survival=floor)
    return Task(request, len(session.token_ids), wanted, owed=True)


def _tasks_ahead(table: SessionTable, limits: Limits, most: int) -> list[Task]:
    sessions = [session for session in table.sessions if session.may_draft_ahead]
    ahead = limits.ahead
    num_branches = ahead.branches if len(sessions) <= ahead.max_branching_sessions else 0
    tasks = (_task_ahead(table, session, limits, num_branches, most) for session in sessions)
    chosen = {task.request.session_key: task for task in tasks if task is not None}
    order = fair_order((s for s in sessions if s.session_key in chosen), limits.max_sessions)
    return [chosen[session.session_key] for session in order]


def _task_ahead(
    table: SessionTable, session: Session, limits: Limits, num_branches: int, most: int
) -> Task | None:
    """None where all was done that may be done before the next commit."""
    ahead, chain = limits.ahead, session.proposal.chain_len
    wanted = limits.wanted(session)
    longest = wanted + ahead.lead_tokens if ahead.lead_tokens and not session.ended else chain
    rounds = session.num_branch_rounds
    branches = bool(num_branches and chain and rounds < MAX_BRANCH_ROUNDS)
    if chain >= longest and not branches:
        return None
    session.num_branch_rounds += branches
    branch_len = min(ahead.branch_len, 1 + most * (rounds + 1))
    request = DraftRequest(
        session.session_key,
        min(longest, chain + most),
        num_branches if branches else 0,
        branch_len if branches else 0,
        table.least_survival(session),
    )
    return Task(request, len(session.token_ids), wanted, owed=False)


def fair_order(sessions: Iterable[Session], limit: int) -> list[Session]:
    """At most `limit` sessions, one of each stream in turn, the first ones first."""
    by_stream: dict[int, list[Session]] = defaultdict(list)
    for session in sessions:
        by_stream[session.stream].append(session)
    turns = zip_longest(*by_stream.values())
    return list(islice((s for turn in turns for s in turn if s is not None), limit))


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What came of a round, by session key."""

    nodes: dict[int, tuple[DraftNode, ...] | None]
    """None: the drafter is not through with reading."""
    failures: dict[int, str]

    @property
    def reads(self) -> bool:
        """Some of the time went into prompts."""
        return None in self.nodes.values()


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
    requests = [t.request for t in work.tasks if t.request.session_key not in failures]
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


def _draft(
    drafter: Drafter, requests: Sequence[DraftRequest]
) -> dict[int, tuple[DraftNode, ...] | None]:
    if not requests:
        return {}
    drafts = drafter.draft(requests)
    return {r.session_key: nodes for r, nodes in zip(requests, drafts, strict=True)}


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a round brought."""

    errors: dict[int, list[SessionError]]
    """By stream; every stream with something to tell is there."""
    growths: tuple[Growth, ...]


def finish_round(table: SessionTable, work: Round, result: RoundResult, now: float) -> RoundOutcome:
    """Put what a round drafted into the table."""
    errors: dict[int, list[SessionError]] = defaultdict(list)
    growths: list[Growth] = []
    for task in work.tasks:
        key = task.request.session_key
        session = table.by_key(key)
        if session is None or key in result.failures:
            continue
        nodes = result.nodes[key]
        if nodes is not None:
            if task.request.num_branches and len(nodes) == chain_len(nodes):
                session.num_branch_rounds = MAX_BRANCH_ROUNDS  # The drafter knows none.
            growths.append(_propose(table, session, task, nodes))
        if task.owed and (nodes is None or not _is_answer(task, nodes)):
            table.owe_again(session, now)
        errors[session.stream] += ()
    for key, message in result.failures.items():
        if (session := table.by_key(key)) is not None:
            errors[session.stream].append(table.fail(session, message))
    return RoundOutcome(errors, tuple(growths))


def _is_answer(task: Task, nodes: Sequence[DraftNode]) -> bool:
    """The chain is as long as was wanted, or has ended before."""
    length = chain_len(nodes)
    return length >= task.wanted or length < task.request.num_tokens


def _propose(
    table: SessionTable, session: Session, task: Task, nodes: Sequence[DraftNode]
) -> Growth:
    return table.propose(
        session,
        task.num_committed,
        nodes,
        answers=task.owed and _is_answer(task, nodes),
        ended=chain_len(nodes) < task.request.num_tokens,
    )


@dataclass(slots=True)
class DraftingRate:
    """Moving figures of a drafter's work, over about AVERAGE_WINDOW_S."""

    _num_branches: int = 0
    _tokens_per_s: float = 0.0
    _queue_ms: float = 0.0
    _updated_at: float = 0.0

    def record(self, growths: Iterable[Growth], queue_s: float, now: float) -> None:
        """Count one round."""
        growths = tuple(growths)
        num_tokens = sum(growth.num_nodes for growth in growths)
        self._num_branches += sum(growth.num_branches for growth in growths)
        kept = self._kept(now)
        self._tokens_per_s = self._tokens_per_s * kept + num_tokens / AVERAGE_WINDOW_S
        self._queue_ms = self._queue_ms * kept + queue_s * 1e3 * (1.0 - kept)
        self._updated_at = now

    def report(self, num_sessions: int, now: float) -> DrafterReport:
        kept = self._kept(now)
        return DrafterReport(
            num_sessions, self._tokens_per_s * kept, self._queue_ms * kept, self._num_branches
        )

    def _kept(self, now: float) -> float:
        return math.exp(-max(0.0, now - self._updated_at) / AVERAGE_WINDOW_S)


class DraftLoop:
    """Runs rounds as long as anything is to be done. Lives on the event loop."""

    def __init__(self, table: SessionTable, drafter: Drafter, limits: Limits) -> None:
        self._table = table
        self._drafter = drafter
        self._limits = limits
        self._rate = DraftingRate()
        self._pace = Pace()
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
                self._work.clear()
                for stream, error in self._table.expire(time.monotonic()):
                    deliver(stream, (error,))
                work = self._plan()
                if not work.operations and not work.tasks:
                    await self._wait_for_work()
                    continue
                started = self._computing_since = time.monotonic()
                result = await loop.run_in_executor(self._compute, run_round, self._drafter, work)
                self._computing_since = None
                if not result.reads:
                    self._pace.observe(work.num_tokens, time.monotonic() - started)
                self._finish(work, result, deliver)
        finally:
            self._compute.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_work(self) -> None:
        try:
            async with asyncio.timeout(EXPIRY_PERIOD_S):
                await self._work.wait()
        except TimeoutError:
            return

    def _plan(self) -> Round:
        work = plan_round(self._table, self._limits, self._pace, time.monotonic())
        self._room.set()
        if not self._table:
            self._unused.set()
        return work

    def _finish(self, work: Round, result: RoundResult, deliver: Deliver) -> None:
        now = time.monotonic()
        outcome = finish_round(self._table, work, result, now)
        self._rate.record(outcome.growths, work.queue_s, now)
        for stream, errors in outcome.errors.items():
            deliver(stream, errors)
