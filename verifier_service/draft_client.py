"""The verifier's side of drafting: keeps every speculative sequence in a session with some drafter.

Lives on the event loop, beside the engine's thread: orders come in once per step, drafts go out
into the engine's inbox. It remembers each sequence's committed tokens, so that a session can be
opened anew on any drafter at any time, and nothing that a drafter does reaches the engine except
drafts and the news that a session is live or lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from cluster.config import SpeculationConfig
from cluster.errors import InvalidRequestError, OverloadedError
from cluster.load import DrafterLoad, DrafterState
from cluster.protocol.messages import (
    DrafterBatch,
    DrafterHello,
    SessionDraft,
    SessionError,
    TargetBatch,
    TargetHello,
)
from cluster.types import Members
from verifier_service.drafter_choice import choose_drafter, next_backoff_s, preferred_drafters
from verifier_service.drafter_link import DrafterLink, Session
from verifier_service.drafter_stream import StreamLostError, run_stream
from verifier_service.events import (
    DraftArrived,
    DraftCommit,
    DraftOpen,
    DraftOrders,
    DraftSessionLive,
    DraftSessionLost,
    EngineInput,
)

logger = logging.getLogger(__name__)

MAX_STREAMS = 8
"""Drafters that a verifier keeps a stream to; others take the places of full and lost ones."""
MAX_DRAFTS_PER_MESSAGE = 16
"""Drafts of a session taken per message to it; a drafter that sends more floods."""
HOUSEKEEPING_PERIOD_S = 0.25
CLOSE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class DraftCounters:
    """What came of everything that drafters sent, and of the streams to them."""

    drafts: int = 0
    """Handed to the engine."""
    stale_epochs: int = 0
    unknown_sessions: int = 0
    surplus_drafts: int = 0
    session_errors: int = 0
    resyncs: int = 0
    sessions_opened: int = 0
    streams_opened: int = 0
    streams_lost: int = 0
    streams_refused: int = 0


class DraftClient:
    """See the module. `post` may be called from this loop's thread and must not block."""

    def __init__(
        self,
        config: SpeculationConfig,
        hello: TargetHello,
        post: Callable[[EngineInput], None],
        rng: random.Random | None = None,
    ) -> None:
        self.counters = DraftCounters()
        self._backoff_s = config.connect_backoff_s
        self._hello = hello
        self._post = post
        self._rng = rng or random.Random()
        self._sessions: dict[int, Session] = {}
        self._waiting: dict[int, Session] = {}
        """Sessions without a link."""
        self._links: dict[str, DrafterLink] = {}
        self._streams: dict[str, _Stream] = {}
        self._refused: set[str] = set()
        """Incarnations that are never dialled again."""
        self._housekeeping: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def num_sessions(self) -> int:
        """Sequences that want drafts, with a drafter or without."""
        return len(self._sessions)

    def update_members(self, members: Members) -> None:
        """The drafters that may be used from now on. A stream to one that is gone from the list
        goes on until it ends, but takes no new session."""
        for incarnation, member in members.items():
            if incarnation not in self._links and incarnation not in self._refused:
                self._links[incarnation] = DrafterLink(member, self._backoff_s)
        for incarnation, link in list(self._links.items()):
            link.listed = incarnation in members
            if not link.listed and incarnation not in self._streams:
                del self._links[incarnation]
        if self._housekeeping is None and not self._closed:
            self._housekeeping = asyncio.create_task(self._keep_house())
        self._rebalance()

    def apply(self, orders: DraftOrders) -> None:
        """Take one step's orders. Waits for nothing; an order for a sequence that is not known any
        more is ignored."""
        for opening in orders.opens:
            self._open(opening)
        for commit in orders.commits:
            self._commit(commit)
        for seq in orders.resyncs:
            self._resync(seq)
        for seqs, paused in ((orders.pauses, True), (orders.resumes, False)):
            for seq in seqs:
                if (session := self._sessions.get(seq)) is not None:
                    session.paused = paused
                    self._changed(session)
        for seq in orders.closes:
            self._close(seq)
        self._wake_streams()

    def record_acceptance(self, incarnation: str, drafted: int, accepted: int) -> None:
        """What became of a drafter's drafts in one step."""
        if (link := self._links.get(incarnation)) is not None:
            link.record_acceptance(drafted, accepted)

    def loads(self) -> tuple[DrafterLoad, ...]:
        """Every drafter that a stream was wanted to."""
        return tuple(link.load() for link in self._links.values() if link.state is not None)

    async def close(self) -> None:
        """End every stream, and with it the sessions on the other side. Idempotent."""
        self._closed = True
        tasks = [stream.task for stream in self._streams.values()]
        if self._housekeeping is not None:
            tasks.append(self._housekeeping)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    # --- orders ---

    def _open(self, opening: DraftOpen) -> None:
        session = Session(opening, list(opening.token_ids))
        self._sessions[opening.seq] = self._waiting[opening.seq] = session
        self._place(session)

    def _commit(self, commit: DraftCommit) -> None:
        session = self._sessions.get(commit.seq)
        if session is not None:
            assert commit.position == len(session.token_ids), "the engine's commits are contiguous"
            session.token_ids += commit.token_ids
            self._changed(session)

    def _resync(self, seq: int) -> None:
        session = self._sessions.get(seq)
        if session is not None and session.link is not None:
            self.counters.resyncs += 1
            link = session.link
            self._reopen(session)
            if link.strike(self._now()):
                self._end_stream(link, "drafts on prefixes that are not ours")

    def _close(self, seq: int) -> None:
        session = self._sessions.pop(seq, None)
        if session is not None:
            self._waiting.pop(seq, None)
            if session.link is not None:
                session.link.let_go(session)

    def _changed(self, session: Session) -> None:
        if session.link is not None:
            session.link.changed(session)

    # --- which drafter has which session ---

    def _place(self, session: Session) -> None:
        """Open a waiting session on the best drafter, if there is one."""
        now = self._now()
        if now < session.not_before:
            return
        incarnation = choose_drafter(
            link.candidate() for link in self._links.values() if link.can_take(session, now)
        )
        if incarnation is not None:
            del self._waiting[session.order.seq]
            self._links[incarnation].take_in(session)
            self.counters.sessions_opened += 1

    def _detach(self, session: Session) -> None:
        """Take a session from its drafter; it waits for another."""
        assert session.link is not None
        session.link.let_go(session)
        self._waiting[session.order.seq] = session
        if session.live:
            session.live = False
            self._post(DraftSessionLost(session.order.seq))

    def _reopen(self, session: Session) -> None:
        """Something is wrong with a session: open it again, at once the first time, and after ever
        longer pauses if that does not help."""
        if session.strikes > 0:
            pause_s = self._backoff_s * 2.0 ** (min(session.strikes, 16) - 1)
            session.not_before = self._now() + min(pause_s, MAX_BACKOFF_S)
        session.strikes += 1
        self._detach(session)
        self._place(session)

    def _place_waiting(self) -> None:
        for session in list(self._waiting.values()):
            self._place(session)

    def _leave_draining(self) -> None:
        """Move the sessions of draining drafters, each as soon as another can take it."""
        now = self._now()
        for link in self._links.values():
            if link.state is DrafterState.DRAINING:
                for session in list(link.sessions.values()):
                    if any(other.can_take(session, now) for other in self._links.values()):
                        self._detach(session)
                        self._place(session)
