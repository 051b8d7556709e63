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
import time
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
from verifier_service.drafter_choice import choose_drafter, preferred_drafters, reopen_pause_s
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
        self._streams: dict[str, DrafterStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Of all streams, those that are ending included."""
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
        self._dial()

    def apply(self, orders: DraftOrders) -> None:
        """Take one step's orders. Waits for nothing; an order for a sequence that is not known any
        more is ignored."""
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
        tasks = list(self._tasks)
        self._streams.clear()
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
        session.not_before = self._now() + reopen_pause_s(session.strikes, self._backoff_s)
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

    # --- what drafters say ---

    def ready(self, stream: DrafterStream, hello: DrafterHello) -> None:
        """For streams: hands were shaken."""
        if self._is_current(stream):
            stream.link.ready(hello, self._now())
            self.counters.streams_opened += 1
            self._settle()

    def received(self, stream: DrafterStream, batch: DrafterBatch) -> None:
        """For streams: a message came."""
        if not self._is_current(stream):
            return
        link = stream.link
        for item in batch.drafts:
            self._take_draft(link, item)
        for error in batch.errors:
            self._take_error(link, error)
        if batch.load is not None:
            link.reported(batch.load)
        if batch.drain and self._is_current(stream):
            link.drain()
        if batch.errors or batch.drain:
            self._settle()

    def _take_draft(self, link: DrafterLink, item: SessionDraft) -> None:
        session = self._sessions.get(item.session)
        if session is None or session.link is not link:
            self.counters.unknown_sessions += 1
        elif item.epoch != session.epoch:
            self.counters.stale_epochs += 1
        elif session.num_drafts_since_told >= MAX_DRAFTS_PER_MESSAGE:
            self.counters.surplus_drafts += 1
            self._strike(link, "a flood of drafts")
        else:
            self._hand_over(link, session, item)

    def _hand_over(self, link: DrafterLink, session: Session, item: SessionDraft) -> None:
        session.num_drafts_since_told += 1
        rtt_s = session.answered(item.draft.anchor_position, self._now())
        if rtt_s is not None:
            link.measured_rtt(rtt_s)
        if not session.live:
            session.live = True
            assert link.hello is not None
            self._post(DraftSessionLive(item.session, link.hello.drafter, link.member.incarnation))
        self.counters.drafts += 1
        self._post(DraftArrived(item.session, item.draft, time.monotonic()))

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
            self._detach(session)
        elif error.kind == InvalidRequestError.__name__:
            session.refused_by.add(link.member.incarnation)
            self._detach(session)
        else:
            self._reopen(session)

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
            stream = self._streams[incarnation] = DrafterStream(link, self)
            self._tasks.add(stream.task)
            stream.task.add_done_callback(self._tasks.discard)

    def _wake_streams(self) -> None:
        for stream in self._streams.values():
            if stream.link.has_news:
                stream.wakeup.set()

    async def serve(self, stream: DrafterStream) -> None:
        """For streams: live until it ends, whatever ends it."""
        try:
            await run_stream(stream.link.member, self._hello, stream)
        except StreamLostError as error:
            self._lost(stream, error.reason, refused=error.refused)
        except Exception as error:
            logger.exception("the stream to drafter %s failed", stream.link.member.address)
            self._lost(stream, repr(error), refused=False)

    def _end_stream(self, link: DrafterLink, reason: str) -> None:
        stream = self._streams.get(link.member.incarnation)
        if stream is not None:
            stream.task.cancel()
            self._lost(stream, reason, refused=False)

    def _lost(self, stream: DrafterStream, reason: str, *, refused: bool) -> None:
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
            self._detach(session)
        if not link.listed:
            del self._links[incarnation]
        self._settle()

    def _is_current(self, stream: DrafterStream) -> bool:
        return self._streams.get(stream.link.member.incarnation) is stream

    async def _keep_house(self) -> None:
        """What depends on time alone: silence, pauses that are over."""
        while True:
            await asyncio.sleep(min(HOUSEKEEPING_PERIOD_S, self._backoff_s / 2))
            now = self._now()
            for stream in list(self._streams.values()):
                if stream.link.is_silent(now):
                    self._end_stream(stream.link, "it owes drafts and sends none")
            self._dial()
            self._settle()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class DrafterStream:
    """One stream of the client: the StreamOwner that run_stream asks, and its task."""

    def __init__(self, link: DrafterLink, client: DraftClient) -> None:
        self.link = link
        self.wakeup = asyncio.Event()
        self._client = client
        self.task = asyncio.create_task(client.serve(self))

    def ready(self, hello: DrafterHello) -> None:
        self._client.ready(self, hello)

    def received(self, batch: DrafterBatch) -> None:
        self._client.received(self, batch)

    async def outgoing(self) -> TargetBatch:
        await self.wakeup.wait()
        self.wakeup.clear()
        batch = self.link.take_batch(asyncio.get_running_loop().time())
        if self.link.has_news:
            self.wakeup.set()
        return batch
