"""A simulated drafter: rounds over the sessions that owe a draft, as drafter_service runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.drafting import DraftSession
from benchmarks.simulation.production import StepCost
from benchmarks.simulation.scenario import MAX_CHAIN, Drafters
from benchmarks.simulation.traffic import Pattern

MAX_ROUND_SESSIONS = 64
ROUND_MS = 10.0
"""Both as in drafter_service/scheduler.py."""
AVERAGING = 0.1
REPORT_PERIOD_S = 0.25
"""Rates of drafters are averaged over so long at least."""


class Answer(NamedTuple):
    """What a round has to say to one session."""

    session: DraftSession
    anchor: int
    pattern: Pattern
    length: int
    answers: int | None
    """The tip behind which it is all that is wanted; None: more is to come."""


Deliver = Callable[["SimulatedDrafter", int, list[Answer]], None]
"""(drafter, verifier, answers): to be sent."""


class SimulatedDrafter:
    """One drafter replica."""

    def __init__(self, number: int, config: Drafters, clock: Clock, deliver: Deliver) -> None:
        self.number = number
        self.name = f"drafter-{number}"
        self.draining = False
        self.num_sessions = 0
        self.busy_s = 0.0
        """With drafts that were owed and with prompts; drafting ahead is not counted."""
        self.num_tokens = 0
        self.queue_ms = 0.0
        """Moving average of the wait for a round."""
        self._config = config
        self._clock = clock
        self._deliver = deliver
        self._cost = StepCost(config.token_ms)
        self._owing: dict[int, deque[tuple[DraftSession, float]]] = {}
        """By verifier: sessions that owe a draft, and since when."""
        self._unread: deque[DraftSession] = deque()
        self._busy = False
        self._round_started_s = 0.0
        self._rate, self._rate_from = 0.0, (0.0, 0)

    def tokens_per_s(self) -> float:
        """Drafted lately."""
        since_s, num_tokens = self._rate_from
        if (passed_s := self._clock.now - since_s) >= REPORT_PERIOD_S:
            self._rate = (self.num_tokens - num_tokens) / passed_s
            self._rate_from = (self._clock.now, self.num_tokens)
        return self._rate

    def open(self, session: DraftSession) -> bool:
        """Take a session; False if there is no room."""
        if self.draining or self.num_sessions >= self._config.max_sessions:
            return False
        self.num_sessions += 1
        if session.unread_tokens and self._config.prompt_ms:
            self._unread.append(session)
        else:
            session.unread_tokens = 0
            self._owe(session)
        self._work()
        return True

    def close(self, session: DraftSession) -> None:
        """Forget it."""
        session.closed = True
        self.num_sessions -= 1

    def take(self, told: Sequence[tuple[DraftSession, int]]) -> None:
        """A verifier's message: each session's answer has so many tokens now."""
        for session, tip in told:
            session.told_tip = max(session.told_tip, tip)
            if not session.unread_tokens:
                self._owe(session)
        self._work()

    def idle_s(self) -> float:
        """Since the start, in all."""
        now = self._clock.now
        running_s = now - self._round_started_s if self._busy else 0.0
        return now - self.busy_s - running_s

    def lead(self, session: DraftSession) -> int:
        """Drafts that it made ahead since it answered: the chain's length with them."""
        if session.idle_mark_s >= 0:
            idle_ms = 1e3 * (self.idle_s() - session.idle_mark_s)
            token_ms = self._cost(min(MAX_ROUND_SESSIONS, max(1, self.num_sessions)))
            num_ahead = min(self._config.lead_tokens, int(idle_ms / token_ms))
            gone = session.told_tip - session.anchor
            longest = min(MAX_CHAIN, gone + session.wanted + self._config.lead_tokens)
            session.length = max(session.length, min(longest, session.length + num_ahead))
            session.idle_mark_s = -1.0
        return session.length

    def _owe(self, session: DraftSession) -> None:
        if not (session.owes or session.paused or session.closed):
            session.owes = True
            session.idle_mark_s = -1.0
            entry = (session, self._clock.now)
            self._owing.setdefault(session.verifier, deque()).append(entry)

    def _work(self) -> None:
        """Begin a round if there is something to do."""
        if self._busy:
            return
        sessions = self._next_sessions()
        num_prompt_tokens = self._read_prompts()
        if not sessions and not num_prompt_tokens:
            return
        missing = [session.catch_up() for session in sessions]
        token_ms = self._cost(len(sessions)) if sessions else 0.0
        num_tokens = max(missing, default=0)
        if num_tokens:
            num_tokens = min(num_tokens, max(1, round(ROUND_MS / token_ms)))
        ms = num_tokens * token_ms + num_prompt_tokens * self._config.prompt_ms
        growth = [min(count, num_tokens) for count in missing]
        self._busy, self._round_started_s = True, self._clock.now
        tips = [session.told_tip for session in sessions]
        self._clock.after(ms / 1e3, lambda: self._finish(sessions, tips, growth, missing))

    def _next_sessions(self) -> list[DraftSession]:
        """One of each verifier in turn."""
        if not self._owing:
            return []
        chosen: list[DraftSession] = []
        if sum(map(len, self._owing.values())) <= MAX_ROUND_SESSIONS:
            entries = [entry for queue in self._owing.values() for entry in queue]
            self._owing.clear()
        else:
            turns = zip_longest(*(list(queue) for queue in self._owing.values()))
            in_turn = (entry for turn in turns for entry in turn if entry is not None)
            entries = list(islice(in_turn, MAX_ROUND_SESSIONS))
            for session, _ in entries:
                self._owing[session.verifier].popleft()
            self._owing = {number: queue for number, queue in self._owing.items() if queue}
        longest_s = 0.0
        for session, since_s in entries:
            session.owes = False
            if not session.closed and not session.paused:
                chosen.append(session)
                longest_s = max(longest_s, self._clock.now - since_s)
        if chosen:
            self.queue_ms += AVERAGING * (1e3 * longest_s - self.queue_ms)
        return chosen

    def _read_prompts(self) -> int:
        """Tokens of prompts that go along with this round; who is read to the end owes a draft."""
        room = self._config.max_step_tokens
        while self._unread and room:
            session = self._unread[0]
            taken = 0 if session.closed else min(room, session.unread_tokens)
            session.unread_tokens -= taken
            room -= taken
            if session.closed or not session.unread_tokens:
                self._unread.popleft()
                self._owe(session)
        return self._config.max_step_tokens - room

    def _finish(
        self,
        sessions: Sequence[DraftSession],
        tips: Sequence[int],
        growth: Sequence[int],
        missing: Sequence[int],
    ) -> None:
        self.busy_s += self._clock.now - self._round_started_s
        self._busy = False
        idle_s = self.idle_s()
        by_verifier: dict[int, list[Answer]] = {}
        for session, tip, grown, wanted in zip(sessions, tips, growth, missing, strict=True):
            self.num_tokens += grown
            if session.closed:
                continue
            session.length += grown
            is_whole = grown == wanted
            answer = Answer(
                session,
                session.anchor,
                session.pattern,
                session.length,
                tip if is_whole else None,
            )
            by_verifier.setdefault(session.verifier, []).append(answer)
            if is_whole:
                session.idle_mark_s = idle_s
            else:
                self._owe(session)
        for verifier, answers in by_verifier.items():
            self._deliver(self, verifier, answers)
        self._work()
