"""The sessions of one drafter: what is open, for which stream, up to which token, and what is
proposed for each.

A state machine: messages in, effects out, time as an argument. It does not draft; what the drafter
must be told (begin, extend, end) gathers in order as operations, which the compute thread takes.
What it drafted comes back here, and what the verifiers are to be told of it is taken from here.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cluster.errors import (
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    UnknownSessionError,
)
from cluster.protocol.codec import check_sampling
from cluster.protocol.messages import (
    MAX_DRAFTS_PER_MESSAGE,
    CommitTokens,
    OpenSession,
    SessionDraft,
    SessionError,
    TargetBatch,
)
from cluster.protocol.prefix_hash import prefix_hash
from cluster.types import DraftNode
from drafter_service.proposal import Growth, Proposal, nodes_behind
from engine.drafting.interface import DraftSession


@dataclass(frozen=True, slots=True)
class Begin:
    """Tell the drafter of a new session."""

    session: DraftSession

    @property
    def session_key(self) -> int:
        return self.session.session_key


@dataclass(frozen=True, slots=True)
class Extend:
    """Tell the drafter of committed tokens."""

    session_key: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Tell the drafter to forget a session."""

    session_key: int


DrafterOperation = Begin | Extend | End


@dataclass(slots=True, eq=False)
class Session:
    """One open session. `session_key` is new with every open, so that what was computed for an
    earlier opening can be told apart."""

    stream: int
    number: int
    """Its name on the stream."""
    session_key: int
    epoch: int
    num_speculative_tokens: int
    token_ids: array[int]
    prefix_hash: int
    heard_at: float
    paused: bool = False
    owed_since: float = 0.0
    """When the oldest message came that no draft has answered; meaningful while a draft is owed."""
    proposal: Proposal = field(default_factory=Proposal)
    """Below all of `token_ids`."""
    answers: int | None = None
    """What the next draft says that it answers."""
    num_drafts_left: int = MAX_DRAFTS_PER_MESSAGE
    """Drafts that may be sent before the next message. The last is kept for an answer."""
    ended: bool = False
    """The chain grows no more before the next commit."""
    num_branch_rounds: int = 0
    """Rounds in which branches of this chain were wanted."""

    @property
    def may_draft_ahead(self) -> bool:
        return not self.paused and self.num_drafts_left > 1

    @property
    def may_be_told(self) -> bool:
        return self.num_drafts_left > (self.answers is None)

    @property
    def has_news(self) -> bool:
        return self.answers is not None or self.proposal.has_untold


@dataclass(slots=True)
class SessionTable:
    """Every open session, at most `max_sessions`.

    Each message touches one session; a wrong one raises nothing out of here but costs that session
    and is told as a SessionError.
    """

    max_sessions: int
    ttl_s: float
    max_context_len: int = 0
    """Tokens; 0 is unbounded."""
    draining: bool = False
    num_errors: Counter[str] = field(default_factory=Counter)
    """By kind."""
    num_expired: int = 0
    """Sessions closed since their verifier fell silent."""
    _streams: dict[int, dict[int, Session]] = field(default_factory=dict)
    _least_survival: dict[int, float] = field(default_factory=dict)
    """By stream, as its verifier said last."""
    _by_key: dict[int, Session] = field(default_factory=dict)
    _owing: dict[int, Session] = field(default_factory=dict)
    """Sessions that owe a draft by key, the longest waiting first."""
    _untold: dict[int, dict[int, Session]] = field(default_factory=dict)
    """Sessions with something to be told, by stream and number."""
    _operations: list[DrafterOperation] = field(default_factory=list)
    _num_opened: int = 0
    _num_streams: int = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def open_stream(self) -> int:
        """A new stream's name here; session numbers are its own."""
        self._num_streams += 1
        self._streams[self._num_streams] = {}
        self._least_survival[self._num_streams] = 0.0
        self._untold[self._num_streams] = {}
        return self._num_streams

    def close_stream(self, stream: int) -> None:
        """The stream ended: close all its sessions."""
        for session in list(self._streams[stream].values()):
            self._close(session)
        del self._streams[stream], self._untold[stream], self._least_survival[stream]

    def apply(self, stream: int, batch: TargetBatch, now: float) -> tuple[SessionError, ...]:
        """Take one message; returns what went wrong, by session."""
        errors: list[SessionError] = []
        is_chance = 0.0 <= batch.least_survival <= 1.0
        self._least_survival[stream] = batch.least_survival if is_chance else 0.0
        for opening in batch.opens:
            try:
                self._open(stream, opening, now)
            except PacelineError as error:
                errors.append(self._fail(stream, opening.session, opening.epoch, error))
        for commit in batch.commits:
            try:
                self._commit(self._find(stream, commit.session), commit, now)
            except PacelineError as error:
                errors.append(self._fail(stream, commit.session, 0, error))
        for numbers, paused in ((batch.pauses, True), (batch.resumes, False)):
            for number in numbers:
                try:
                    self._set_paused(self._find(stream, number), paused, now)
                except PacelineError as error:
                    errors.append(self._fail(stream, number, 0, error))
        for number in batch.closes:
            # An unknown one is not an error: it may have expired or failed meanwhile.
            if (session := self._streams[stream].get(number)) is not None:
                self._close(session)
        return tuple(errors)

    def expire(self, now: float) -> tuple[tuple[int, SessionError], ...]:
        """Close what was silent for too long; returns (stream, error) of each."""
        silent = [s for s in self._by_key.values() if now - s.heard_at > self.ttl_s]
        self.num_expired += len(silent)
        error = UnknownSessionError(f"no message for {self.ttl_s:g} s")
        return tuple((s.stream, self._fail(s.stream, s.number, s.epoch, error)) for s in silent)

    def expire_stream(self, stream: int, silent_s: float) -> tuple[SessionError, ...]:
        """Close all sessions of a stream on which nothing came for so long."""
        sessions = list(self._streams[stream].values())
        self.num_expired += len(sessions)
        error = UnknownSessionError(f"the verifier said nothing for {silent_s:g} s")
        return tuple(self._fail(stream, s.number, s.epoch, error) for s in sessions)

    def least_survival(self, session: Session) -> float:
        """A token whose chance to be accepted is lower is not worth drafting; 0 is unknown."""
        return self._least_survival[session.stream]

    def num_sessions_of(self, stream: int) -> int:
        return len(self._streams[stream])

    def fail(self, session: Session, message: str) -> SessionError:
        """Close a session whose draft could not be made."""
        error = InternalError(message)
        return self._fail(session.stream, session.number, session.epoch, error)

    def by_key(self, session_key: int) -> Session | None:
        """The session if it is still in that opening."""
        return self._by_key.get(session_key)

    @property
    def owing(self) -> Iterable[Session]:
        """Sessions that owe a draft, the longest waiting first. Never a paused one."""
        return self._owing.values()

    @property
    def sessions(self) -> Iterable[Session]:
        return self._by_key.values()

    @property
    def num_active(self) -> int:
        """Sessions that are not paused."""
        return sum(not session.paused for session in self._by_key.values())

    def take(self, session: Session) -> None:
        """The draft that the session owes is being made, from the tokens it has now."""
        del self._owing[session.session_key]

    def owe_again(self, session: Session, now: float) -> None:
        """It was not finished: the session waits for its next turn."""
        if not session.paused and session.session_key not in self._owing:
            session.owed_since = now
            self._owing[session.session_key] = session

    def propose(
        self,
        session: Session,
        num_committed: int,
        nodes: Sequence[DraftNode],
        *,
        answers: bool,
        ended: bool,
    ) -> Growth:
        """A draft from the session's first `num_committed` tokens, whether that is all that was
        wanted from there, and whether its chain can grow no more."""
        if since := session.token_ids[num_committed:]:
            nodes = nodes_behind(nodes, since)
        else:
            session.ended = ended
            if answers:
                session.answers = num_committed
        growth = session.proposal.add(nodes)
        if session.has_news:
            self._untold[session.stream][session.number] = session
        return growth

    def has_news(self, stream: int) -> bool:
        """Whether there are drafts to be told on a stream."""
        return any(session.may_be_told for session in self._untold[stream].values())

    def take_drafts(self, stream: int) -> tuple[SessionDraft, ...]:
        """What is to be told on a stream; it counts as told from now on."""
        sessions = [s for s in self._untold[stream].values() if s.may_be_told]
        for session in sessions:
            del self._untold[stream][session.number]
        return tuple(_take_draft(s) for s in sessions if s.has_news)

    @property
    def num_operations(self) -> int:
        return len(self._operations)

    def take_operations(self) -> tuple[DrafterOperation, ...]:
        """What the drafter has not been told yet, in order; the caller must tell it."""
        operations, self._operations = tuple(self._operations), []
        return operations

    def _open(self, stream: int, opening: OpenSession, now: float) -> None:
        self._check_open(opening)
        earlier = self._streams[stream].get(opening.session)
        if earlier is not None:
            self._close(earlier)
        else:
            self._check_room()
        self._num_opened += 1
        session = Session(
            stream=stream,
            number=opening.session,
            session_key=self._num_opened,
            epoch=opening.epoch,
            num_speculative_tokens=opening.num_speculative_tokens,
            token_ids=array("I", opening.token_ids),
            prefix_hash=prefix_hash(opening.token_ids),
            heard_at=now,
        )
        self._streams[stream][session.number] = session
        self._by_key[session.session_key] = session
        self._hear(session, now)
        self._operations.append(
            Begin(
                DraftSession(
                    session.session_key,
                    opening.token_ids,
                    opening.num_prompt_tokens,
                    opening.request_key,
                    opening.sampling,
                    tenant=opening.cache_salt,
                    wants_laws=opening.wants_laws,
                )
            )
        )

    def _check_open(self, opening: OpenSession) -> None:
        if not 0 < opening.num_prompt_tokens <= len(opening.token_ids):
            raise InvalidRequestError(
                "num_prompt_tokens must be over 0 and within token_ids", param="num_prompt_tokens"
            )
        check_sampling(opening.sampling)
        self._check_len(len(opening.token_ids))

    def _check_room(self) -> None:
        if self.draining:
            raise OverloadedError("this drafter drains")
        if len(self._by_key) >= self.max_sessions:
            raise OverloadedError(f"all {self.max_sessions} sessions are taken")

    def _check_len(self, num_tokens: int) -> None:
        if 0 < self.max_context_len < num_tokens:
            raise InvalidRequestError(
                f"{num_tokens} tokens are over this drafter's {self.max_context_len}",
                param="token_ids",
            )

    def _commit(self, session: Session, commit: CommitTokens, now: float) -> None:
        num_tokens = len(session.token_ids)
        end = commit.position + len(commit.token_ids)
        if not commit.token_ids:
            raise InvalidRequestError("a commit holds at least one token", param="token_ids")
        if end <= num_tokens:
            if session.token_ids[commit.position : end] != array("I", commit.token_ids):
                raise InvalidRequestError(
                    f"the tokens from {commit.position} on are others", param="token_ids"
                )
        elif commit.position != num_tokens:
            raise InvalidRequestError(
                f"a commit at {commit.position}, but the session has {num_tokens} tokens",
                param="position",
            )
        else:
            self._check_len(end)
            session.token_ids.extend(commit.token_ids)
            session.prefix_hash = prefix_hash(commit.token_ids, session.prefix_hash)
            session.proposal.commit(commit.token_ids)
            session.answers, session.ended, session.num_branch_rounds = None, False, 0
            self._operations.append(Extend(session.session_key, commit.token_ids))
        self._hear(session, now)

    def _set_paused(self, session: Session, paused: bool, now: float) -> None:
        session.paused = paused
        self._owing.pop(session.session_key, None)
        self._hear(session, now)

    def _hear(self, session: Session, now: float) -> None:
        session.heard_at = now
        session.num_drafts_left = MAX_DRAFTS_PER_MESSAGE
        if not session.paused and session.session_key not in self._owing:
            session.owed_since = now
            self._owing[session.session_key] = session

    def _find(self, stream: int, number: int) -> Session:
        session = self._streams[stream].get(number)
        if session is None:
            raise UnknownSessionError(f"session {number} is not open here")
        return session

    def _fail(self, stream: int, number: int, epoch: int, error: PacelineError) -> SessionError:
        session = self._streams[stream].get(number)
        if session is not None:
            epoch = max(epoch, session.epoch)
            self._close(session)
        kind = type(error).__name__
        self.num_errors[kind] += 1
        return SessionError(number, epoch, kind, error.message)

    def _close(self, session: Session) -> None:
        del self._streams[session.stream][session.number]
        del self._by_key[session.session_key]
        self._untold[session.stream].pop(session.number, None)
        self._owing.pop(session.session_key, None)
        self._operations.append(End(session.session_key))


def _take_draft(session: Session) -> SessionDraft:
    draft = session.proposal.take_untold(len(session.token_ids), session.prefix_hash)
    draft = draft._replace(answers=session.answers)
    session.answers = None
    session.num_drafts_left -= 1
    return SessionDraft(session.number, session.epoch, draft)
