"""The verifier's side of drafting: keeps every speculative sequence in a session with some drafter.

Lives on the event loop, beside the engine's thread: orders come in once per step, drafts go out
into the engine's inbox. It remembers each sequence's committed tokens, so that a session can be
opened anew on any drafter at any time, and nothing that a drafter does reaches the engine except
drafts and the news that a session is live or lost.

It knows no clock and no socket: both are its Network, which a test may simulate.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.config import SpeculationConfig
from cluster.errors import InvalidRequestError, OverloadedError
from cluster.load import DrafterLoad, DrafterState
from cluster.protocol.messages import (
    DrafterBatch,
    DrafterHello,
    SessionDraft,
    SessionError,
    TargetHello,
)
from cluster.types import Members
from verifier_service.acceptance_breaker import Turn
from verifier_service.drafter_choice import choose_drafter, preferred_drafters, reopen_pause_s
from verifier_service.drafter_link import DrafterLink, Session
from verifier_service.events import (
    DraftArrived,
    DraftCommit,
    DraftOpen,
    DraftOrders,
    DraftSessionLive,
    DraftSessionLost,
    DraftVerdict,
    EngineInput,
)
from verifier_service.recorders import DraftRecorder, Fallback

logger = logging.getLogger(__name__)

MAX_STREAMS = 8
"""Drafters that a verifier keeps a stream to; others take the places of full and lost ones."""
LEASE_S = 10.0
"""A drafter closes our sessions when it hears nothing for so long: our event loop is stuck, however
alive the connection is."""
HEARTBEAT_S = 1.0
"""Between two words to a drafter that has sessions of ours."""
HOUSEKEEPING_PERIOD_S = 0.25


class Stream(Protocol):
    """The client's end of a stream to one drafter. Whoever carries it calls `ready`, `received` and
    `lost` of the client, and sends `link.take_batch()` after a wake."""

    @property
    def link(self) -> DrafterLink: ...

    def wake(self) -> None:
        """Something is to be told."""

    def end(self) -> None:
        """Carry nothing more, either way."""


class Network(Protocol):
    """What a draft client stands on."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def dial(self, link: DrafterLink, client: DraftClient) -> Stream:
        """Begin a stream."""

    def repeat(self, period_s: float, action: Callable[[], None]) -> None:
        """Call the action once in each period from now on."""

    async def close(self) -> None:
        """End every stream and every repetition."""


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
    times_distrusted: int = 0


class DraftClient:
    """See the module. `post` may be called from this loop's thread and must not block."""

    def __init__(
        self,
        config: SpeculationConfig,
        hello: TargetHello,
        post: Callable[[EngineInput], None],
        network: Network,
        rng: random.Random | None = None,
    ) -> None:
        self.counters = DraftCounters()
        self.recorder = DraftRecorder()
        self._backoff_s = config.connect_backoff_s
        self._hello = hello
        self._post = post
        self._network = network
        self._rng = rng or random.Random()
        self._sessions: dict[int, Session] = {}
        self._waiting: dict[int, Session] = {}
        """Sessions without a link."""
        self._links: dict[str, DrafterLink] = {}
        self._streams: dict[str, Stream] = {}
        self._refused: set[str] = set()
        """Incarnations that are never dialled again."""
        self._keeps_house = False
        self._closed = False

    @property
    def drafter_names(self) -> set[str]:
        """Of the drafters that shook hands."""
        return {link.hello.drafter for link in self._links.values() if link.hello is not None}

    @property
    def num_sessions(self) -> int:
        """Sequences that want drafts, with a drafter or without."""
        return len(self._sessions)

    @property
    def lacks_drafters(self) -> bool:
        """Sessions wait, and the cluster has no drafter that might take them one day."""
        return bool(self._waiting) and not any(link.listed for link in self._links.values())

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
        if not self._keeps_house and not self._closed:
            self._keeps_house = True
            period_s = min(HOUSEKEEPING_PERIOD_S, self._backoff_s / 2)
            self._network.repeat(period_s, self.keep_house)
        self._dial()

    def apply(self, orders: DraftOrders) -> None:
        """Take one step's orders. Waits for nothing; an order for a sequence that is not known any
        more is ignored."""
        for link in self._links.values():
            link.least_survival = orders.least_survival
        for opening in orders.opens:
            self._open(opening)
        for commit in orders.commits:
            self._commit(commit)
        for seq in orders.resyncs:
            self._resync(seq)
        for seq in orders.malformed:
            session = self._sessions.get(seq)
            if session is not None and session.link is not None:
                self._strike(session.link, "malformed drafts")
        for seqs, paused in ((orders.pauses, True), (orders.resumes, False)):
            for seq in seqs:
                if (session := self._sessions.get(seq)) is not None:
                    session.paused = paused
                    self._changed(session)
        for seq in orders.closes:
            self._close(seq)
        self._wake_streams()

    def record(self, verdict: DraftVerdict) -> None:
        """What became of a drafter's drafts in one step."""
        if (link := self._links.get(verdict.incarnation)) is not None:
            self._follow(link, link.record(verdict, self._now()))

    def loads(self) -> tuple[DrafterLoad, ...]:
        """Every drafter that a stream was wanted to."""
        now = self._now()
        return tuple(link.load(now) for link in self._links.values() if link.state is not None)

    async def close(self) -> None:
        """End every stream, and with it the sessions on the other side. Idempotent."""
        self._closed = True
        self._streams.clear()
        await self._network.close()

    # --- orders ---

    def _open(self, opening: DraftOpen) -> None:
        session = Session(opening, list(opening.token_ids))
        self._sessions[opening.seq] = self._waiting[opening.seq] = session
        self._place(session)
        if session.link is None:
            self.recorder.fallbacks[Fallback.NO_DRAFTER] += 1

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
            self._reopen(session, Fallback.RESYNC)
            self._strike(link, "drafts on prefixes that are not ours")

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

    def _detach(self, session: Session, reason: Fallback) -> None:
        """Take a session from its drafter; it waits for another."""
        assert session.link is not None
        if not session.paused:
            self.recorder.fallbacks[reason] += 1
        session.link.let_go(session)
        self._waiting[session.order.seq] = session
        if session.live:
            session.live = False
            self._post(DraftSessionLost(session.order.seq))

    def _reopen(self, session: Session, reason: Fallback) -> None:
        """Something is wrong with a session: open it again, at once the first time, and after ever
        longer pauses if that does not help."""
        session.not_before = self._now() + reopen_pause_s(session.strikes, self._backoff_s)
        session.strikes += 1
        self._detach(session, reason)
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
                        self._detach(session, Fallback.DRAINING)
                        self._place(session)

    def _follow(self, link: DrafterLink, turn: Turn | None) -> None:
        """Its breaker opened: its sessions go elsewhere, or on without. It closed: it may have as
        many as there are."""
        if turn is None:
            return
        said = f"of {turn.num_judged} first drafts {turn.num_accepted} were accepted"
        address = link.member.address
        if turn.pause_s:
            logger.warning("drafter %s is left alone for %g s: %s", address, turn.pause_s, said)
            self.counters.times_distrusted += 1
            for session in list(link.sessions.values()):
                self._detach(session, Fallback.DISTRUSTED)
        else:
            logger.info("drafter %s is trusted again: %s", address, said)
        self._settle()

    # --- what drafters say ---

    def ready(self, stream: Stream, hello: DrafterHello) -> None:
        """For streams: hands were shaken."""
        if self._is_current(stream):
            stream.link.ready(hello, self._now())
            self.counters.streams_opened += 1
            self._settle()

    def received(self, stream: Stream, batch: DrafterBatch) -> None:
        """For streams: a message came."""
        if not self._is_current(stream):
            return
        link, now = stream.link, self._now()
        for item in batch.drafts:
            self._take_draft(link, item, now)
        for error in batch.errors:
            self._take_error(link, error)
        if batch.load is not None:
            link.reported(batch.load)
        if batch.drain and self._is_current(stream):
            link.drain()
        if batch.errors or batch.drain:
            self._settle()

    def _take_draft(self, link: DrafterLink, item: SessionDraft, now: float) -> None:
        session = self._sessions.get(item.session)
        if session is None or session.link is not link:
            self.counters.unknown_sessions += 1
        elif item.epoch != session.epoch:
            self.counters.stale_epochs += 1
        elif session.num_drafts_allowed == 0:
            self.counters.surplus_drafts += 1
            self._strike(link, "a flood of drafts")
        else:
            self._hand_over(link, session, item, now)

    def _hand_over(
        self, link: DrafterLink, session: Session, item: SessionDraft, now: float
    ) -> None:
        session.num_drafts_allowed -= 1
        rtt_s = session.answered(item.draft, now)
        if rtt_s is not None:
            link.measured_rtt(rtt_s)
            self.recorder.rtt_seconds.observe(rtt_s)
        if not session.live:
            session.live = True
            assert link.hello is not None
            name, incarnation = link.hello.drafter, link.member.incarnation
            self._post(DraftSessionLive(item.session, name, incarnation, session.tells_laws))
        self.counters.drafts += 1
        self._post(DraftArrived(item.session, item.draft, now))

    def _take_error(self, link: DrafterLink, error: SessionError) -> None:
        """Epoch 0 is the error of a session that the drafter does not know. If an opening is on its
        way, the error is older than that."""
        session = self._sessions.get(error.session)
        if session is None or session.link is not link:
            self.counters.unknown_sessions += 1
        elif error.epoch != session.epoch and (error.epoch != 0 or session.opening):
            self.counters.stale_epochs += 1
        else:
            self.counters.session_errors += 1
            self._react(link, session, error)

    def _react(self, link: DrafterLink, session: Session, error: SessionError) -> None:
        link.closed_by_drafter(session)
        if error.kind == OverloadedError.__name__:
            link.full(self._now())
            self._detach(session, Fallback.FULL)
        elif error.kind == InvalidRequestError.__name__:
            session.refused_by.add(link.member.incarnation)
            self._detach(session, Fallback.REFUSED)
        else:
            self._reopen(session, Fallback.ERROR)

    def _strike(self, link: DrafterLink, breach: str) -> None:
        if link.strike(self._now()):
            self._end_stream(link, breach)

    # --- streams ---

    def _settle(self) -> None:
        """Something changed about drafters: give every session the best place there is."""
        self._place_waiting()
        self._leave_draining()
        self._wake_streams()

    def _dial(self) -> None:
        """Keep streams to the preferred ones of all usable drafters. Called at a bounded rate, so
        that a fleet that is lost at once makes no storm of retries."""
        if self._closed:
            return
        now = self._now()
        usable = [name for name, link in self._links.items() if link.is_usable(now)]
        wanted = preferred_drafters(self._hello.incarnation, usable, MAX_STREAMS)
        for incarnation in wanted - self._streams.keys():
            link = self._links[incarnation]
            link.connect()
            self._streams[incarnation] = self._network.dial(link, self)

    def _wake_streams(self) -> None:
        for stream in self._streams.values():
            if stream.link.has_news:
                stream.wake()

    def _end_stream(self, link: DrafterLink, reason: str) -> None:
        stream = self._streams.get(link.member.incarnation)
        if stream is not None:
            stream.end()
            self.lost(stream, reason, refused=False)

    def lost(self, stream: Stream, reason: str, *, refused: bool) -> None:
        """For streams: it has ended. With `refused`, another one to this drafter is of no use."""
        link, incarnation = stream.link, stream.link.member.incarnation
        if not self._is_current(stream):
            return
        del self._streams[incarnation]
        logger.warning("drafter %s is lost: %s", link.member.address, reason)
        if refused:
            self._refused.add(incarnation)
            self.counters.streams_refused += 1
        else:
            self.counters.streams_lost += 1
        link.lose(refused=refused, jitter=self._rng.random(), now=self._now())
        for session in list(link.sessions.values()):
            self._detach(session, Fallback.LOST)
        if not link.listed:
            del self._links[incarnation]
        self._settle()

    def _is_current(self, stream: Stream) -> bool:
        return self._streams.get(stream.link.member.incarnation) is stream

    def keep_house(self) -> None:
        """What depends on time alone: silence, pauses that are over."""
        now = self._now()
        for stream in list(self._streams.values()):
            if stream.link.is_silent(now):
                self._end_stream(stream.link, "it owes drafts and sends none")
        for link in list(self._links.values()):
            self._follow(link, link.watch_probe(now))
        self._beat(now)
        self._dial()
        self._settle()

    def _beat(self, now: float) -> None:
        """Renew our leases where nothing was said for a while, by an empty message."""
        for stream in self._streams.values():
            if stream.link.sessions and now - stream.link.told_at >= HEARTBEAT_S:
                stream.wake()

    def _now(self) -> float:
        return self._network.now()
