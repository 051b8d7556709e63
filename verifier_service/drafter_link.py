"""What the draft client knows of one drafter: its state, its sessions, and what it was told.

Time is an argument. What a drafter has not been told yet is not a queue of messages but the
difference between what is so and what it was told, taken when the stream is ready to write: so
nothing piles up before a drafter that does not read.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from cluster.load import DrafterLoad, DrafterState
from cluster.protocol.messages import (
    MAX_DRAFTS_PER_MESSAGE,
    CommitTokens,
    DrafterHello,
    DrafterReport,
    OpenSession,
    TargetBatch,
)
from cluster.types import Draft, Member
from verifier_service.acceptance_breaker import AcceptanceBreaker, Turn
from verifier_service.drafter_choice import Candidate, next_backoff_s
from verifier_service.events import DraftOpen, DraftVerdict, Foresight

MAX_BATCH_TOKENS = 1 << 20
"""Tokens in one message, which keeps it under the transport's limit; the rest follows."""
SILENCE_TIMEOUT_S = 30.0
"""A drafter that owes a draft for this long is lost, however alive its transport is. Steps do not
wait for it meanwhile; a draft model may well take seconds to read a long prompt."""
MAX_DRAFTS_ALLOWED = 16 * MAX_DRAFTS_PER_MESSAGE
"""However many messages a drafter has let pass, it may not make up for them all at once."""
MAX_STRIKES = 8
STRIKE_WINDOW_S = 60.0
HEALTHY_S = 30.0
"""A stream that lived this long has earned a short first pause again."""
RTT_WEIGHT = 0.1


@dataclass(slots=True, eq=False)
class Session:
    """One sequence's draft session. Without a link it waits for a drafter."""

    order: DraftOpen
    token_ids: list[int]
    """All committed tokens."""
    paused: bool = False
    epoch: int = 0
    """Counts the openings of this session, on whatever drafter."""
    link: DrafterLink | None = None
    told_open: bool = False
    told_len: int = 0
    """How many of token_ids the link's drafter was told."""
    told_paused: bool = False
    live: bool = False
    """A draft of this epoch has come."""
    asked: deque[tuple[int, float]] = field(default_factory=deque)
    """(position, time) of every message that a draft has yet to answer."""
    num_drafts_allowed: int = 0
    """What the drafter may still send of it, by what it was told."""
    drafted_at: float = 0.0
    """When the latest draft of this epoch came."""
    strikes: int = 0
    """Openings that went wrong."""
    not_before: float = 0.0
    """Earliest time of the next opening."""
    refused_by: set[str] = field(default_factory=set)
    """Incarnations that will not have it."""

    @property
    def tells_laws(self) -> bool:
        """It wants its drafts' laws, and its drafter tells them."""
        hello = self.link.hello if self.link is not None else None
        return self.order.wants_laws and hello is not None and hello.tells_laws

    @property
    def opening(self) -> bool:
        """The drafter was told to open it and has not answered yet."""
        return bool(self.asked) and not self.live

    def answered(self, draft: Draft, now: float) -> float | None:
        """A draft came: how long ago was it asked for, if it answers anything."""
        self.drafted_at = now
        asked_at = None
        while draft.answers is not None and self.asked and self.asked[0][0] <= draft.answers:
            asked_at = self.asked.popleft()[1]
        return None if asked_at is None else now - asked_at


class DrafterLink:
    """One drafter. Invariant: `session.link is self` for exactly the values of `sessions`; `unsent`
    is a part of them."""

    def __init__(self, member: Member, backoff_s: float) -> None:
        self.member = member
        self.state: DrafterState | None = None
        """None: no stream is wanted at the moment."""
        self.listed = True
        """Still among the members."""
        self.hello: DrafterHello | None = None
        self.sessions: dict[int, Session] = {}
        self._unsent: dict[int, Session] = {}
        self._known: set[int] = set()
        """Sessions that the drafter was told to open."""
        self._closes: dict[int, None] = {}
        self.least_survival = 0.0
        """Drafts that are less likely to be accepted are not wanted."""
        self.told_at = 0.0
        """When the last message to it was taken."""
        self._breaker = AcceptanceBreaker(backoff_s)
        self._report = DrafterReport(0, 0.0, 0.0)
        self._rtt_ms = 0.0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._foresights: Counter[Foresight] = Counter()
        self._first_backoff_s = backoff_s
        self._backoff_s = backoff_s
        self._retry_at = 0.0
        self._full_until = 0.0
        self._ready_at = 0.0
        self._strikes: deque[float] = deque()

    # --- state ---

    def is_usable(self, now: float) -> bool:
        """A stream to it is worth having."""
        if not self.listed or now < self._full_until or self._breaker.is_open(now):
            return False
        if self.state is DrafterState.LOST:
            return now >= self._retry_at
        return self.state not in (DrafterState.REFUSED, DrafterState.DRAINING)

    def can_take(self, session: Session, now: float) -> bool:
        """Whether to open this session there."""
        return (
            self.hello is not None
            and self.state is DrafterState.READY
            and self.is_usable(now)
            # A message's opens are applied before its closes.
            and len(self.sessions) + len(self._closes) < self.hello.max_sessions
            and self._breaker.may_take(
                now, num_sessions=len(self.sessions), drafts=not session.paused
            )
            and session.order.drafter in ("auto", self.hello.kind, self.hello.drafter)
            and self.member.incarnation not in session.refused_by
        )

    def candidate(self) -> Candidate:
        return Candidate(self.member.incarnation, len(self.sessions), self._rtt_ms)

    def connect(self) -> None:
        self.state = DrafterState.CONNECTING

    def ready(self, hello: DrafterHello, now: float) -> None:
        self.hello = hello
        self.state = DrafterState.READY
        self._ready_at = now

    def drain(self) -> None:
        self.state = DrafterState.DRAINING

    def lose(self, *, refused: bool, jitter: float, now: float) -> None:
        """The stream ended: what the drafter knew is gone. `jitter` in [0, 1) spreads the retries
        of many verifiers."""
        if self.state is DrafterState.READY and now - self._ready_at > HEALTHY_S:
            self._backoff_s = self._first_backoff_s
        self.state = DrafterState.REFUSED if refused else DrafterState.LOST
        self._retry_at = now + self._backoff_s * (0.5 + jitter)
        self._backoff_s = next_backoff_s(self._backoff_s)
        self._known.clear()
        self._closes.clear()
        self._strikes.clear()

    def full(self, now: float) -> None:
        """It refused a session for want of room: leave it alone for a while."""
        self._full_until = now + self._first_backoff_s

    def strike(self, now: float) -> bool:
        """Count a breach of the protocol; True if there were too many of late."""
        self._strikes.append(now)
        while now - self._strikes[0] > STRIKE_WINDOW_S:
            self._strikes.popleft()
        return len(self._strikes) > MAX_STRIKES

    def is_silent(self, now: float) -> bool:
        return any(
            session.asked and now - max(session.asked[0][1], session.drafted_at) > SILENCE_TIMEOUT_S
            for session in self.sessions.values()
        )

    # --- sessions ---

    def take_in(self, session: Session) -> None:
        """Give it a session to open."""
        seq = session.order.seq
        session.link = self
        session.epoch += 1
        session.told_open = session.told_paused = session.live = False
        session.asked.clear()
        session.num_drafts_allowed, session.drafted_at = 0, 0.0
        self.sessions[seq] = session
        # Opening again replaces what the drafter had; a close would end the new session.
        self._closes.pop(seq, None)
        self._unsent[seq] = session

    def let_go(self, session: Session) -> None:
        """Take a session away from it."""
        seq = session.order.seq
        session.link = None
        session.asked.clear()
        del self.sessions[seq]
        self._unsent.pop(seq, None)
        if seq in self._known:
            self._closes[seq] = None

    def closed_by_drafter(self, session: Session) -> None:
        """The drafter has closed it by itself and needs no word of ours."""
        self._known.discard(session.order.seq)

    def changed(self, session: Session) -> None:
        """Something of the session is to be told."""
        self._unsent[session.order.seq] = session

    @property
    def has_news(self) -> bool:
        return bool(self._unsent or self._closes)

    def take_batch(self, now: float) -> TargetBatch:
        """One message of what is to be told, up to about MAX_BATCH_TOKENS."""
        self.told_at = now
        opens: list[OpenSession] = []
        commits: list[CommitTokens] = []
        pauses: list[int] = []
        resumes: list[int] = []
        num_tokens = 0
        while self._unsent and num_tokens < MAX_BATCH_TOKENS:
            seq = next(iter(self._unsent))
            session = self._unsent.pop(seq)
            token_ids = tuple(session.token_ids[session.told_len if session.told_open else 0 :])
            num_tokens += len(token_ids)
            if not session.told_open:
                opens.append(_open_message(session, token_ids))
                self._known.add(seq)
            elif token_ids:
                commits.append(CommitTokens(seq, session.told_len, token_ids))
            if session.paused != session.told_paused:
                (pauses if session.paused else resumes).append(seq)
            _told(session, now)
        closes, self._closes = tuple(self._closes), {}
        self._known.difference_update(closes)
        return TargetBatch(
            None,
            tuple(opens),
            tuple(commits),
            tuple(pauses),
            tuple(resumes),
            closes,
            self.least_survival,
        )

    # --- load ---

    def reported(self, report: DrafterReport) -> None:
        if math.isfinite(report.tokens_per_s) and math.isfinite(report.queue_ms):
            self._report = report

    def measured_rtt(self, rtt_s: float) -> None:
        weight = RTT_WEIGHT if self._rtt_ms else 1.0
        self._rtt_ms += weight * (rtt_s * 1e3 - self._rtt_ms)

    def record(self, verdict: DraftVerdict, now: float) -> Turn | None:
        self._num_draft_tokens += verdict.num_draft_tokens
        self._num_accepted_tokens += verdict.num_accepted_tokens
        if verdict.foresight is not None:
            self._foresights[verdict.foresight] += 1
        return self._breaker.record(now, accepted=verdict.num_accepted_tokens > 0)

    def watch_probe(self, now: float) -> Turn | None:
        """Call now and then."""
        return self._breaker.watch(len(self.sessions), now)

    def _count(self, *, corrected: bool) -> int:
        return sum(n for seen, n in self._foresights.items() if seen.corrected == corrected)

    def _state_to_tell(self, now: float) -> DrafterState:
        if self.state is DrafterState.READY and self._breaker.is_open(now):
            return DrafterState.DISTRUSTED
        return self.state or DrafterState.LOST

    def load(self, now: float) -> DrafterLoad:
        return DrafterLoad(
            incarnation=self.member.incarnation,
            state=self._state_to_tell(now),
            sessions=len(self.sessions),
            tokens_per_s=self._report.tokens_per_s,
            queue_ms=self._report.queue_ms,
            rtt_ms=self._rtt_ms,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            kind=self.hello.kind if self.hello else "",
            num_accepted_chains=self._count(corrected=False),
            num_ahead_hits=self._foresights[Foresight(corrected=False, is_ready=True)],
            num_corrections=self._count(corrected=True),
            num_correction_hits=self._foresights[Foresight(corrected=True, is_ready=True)],
            num_branches=self._report.num_branches,
        )


def _open_message(session: Session, token_ids: tuple[int, ...]) -> OpenSession:
    order = session.order
    return OpenSession(
        session=order.seq,
        epoch=session.epoch,
        token_ids=token_ids,
        num_prompt_tokens=order.num_prompt_tokens,
        request_key=order.request_key,
        sampling=order.sampling,
        num_speculative_tokens=order.num_speculative_tokens,
        cache_salt=order.cache_salt,
        wants_laws=session.tells_laws,
    )


def _told(session: Session, now: float) -> None:
    """Note that the drafter now knows all of the session, and what it owes for that."""
    owes = not session.told_open or session.told_paused or session.told_len < len(session.token_ids)
    session.told_open, session.told_paused = True, session.paused
    session.told_len = len(session.token_ids)
    allowed = session.num_drafts_allowed + MAX_DRAFTS_PER_MESSAGE
    session.num_drafts_allowed = min(allowed, MAX_DRAFTS_ALLOWED)
    if session.paused:
        session.asked.clear()
    elif owes:
        session.asked.append((session.told_len, now))
