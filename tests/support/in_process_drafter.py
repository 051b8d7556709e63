"""An engine with a real draft client and one drafter, in one thread and on the engine's own clock:
what is said arrives at once, so that everything that depends on time can be seen in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cluster.config import SpeculationConfig
from cluster.protocol.messages import (
    DrafterBatch,
    DrafterHello,
    SessionDraft,
    TargetBatch,
    TargetHello,
)
from cluster.types import Member
from tests.support.engine_driver import EngineDriver
from tests.support.scripted_drafter import ScriptedSession, chain_of, draft_of
from verifier_service.draft_client import DraftClient
from verifier_service.drafter_link import DrafterLink
from verifier_service.events import DraftVerdict, EngineOutput
from verifier_service.planner import StepProfile

MEMBER = Member("incarnation", "in-process")

Continuation = Callable[[list[int], int], Sequence[int]]
"""Committed tokens and depth -> the draft's chain."""


class _Stream:
    def __init__(self, link: DrafterLink) -> None:
        self.link = link

    def wake(self) -> None:
        """Whatever is to be told is taken soon anyway."""

    def end(self) -> None:
        raise AssertionError("nothing gave cause for that")


class InProcessDrafting(EngineDriver):
    """Is the draft client's Network too. `continuation` may be changed at any time."""

    def __init__(
        self,
        runner: Any,
        now: Callable[[], float],
        continuation: Continuation,
        speculation: SpeculationConfig,
        profile: StepProfile | None = None,
    ) -> None:
        super().__init__(runner, speculation=speculation, profile=profile)
        self.now = now
        self.continuation = continuation
        self.verdicts: list[DraftVerdict] = []
        self.open_sessions: dict[int, ScriptedSession] = {}
        """At the drafter."""
        self._stream: _Stream | None = None
        self._repeated: list[Callable[[], None]] = []
        hello = TargetHello("verifier", "target", "")
        self.client = DraftClient(speculation, hello, self.engine.inbox.put, self)
        self.client.update_members({MEMBER.incarnation: MEMBER})
        assert self._stream is not None
        self.client.ready(
            self._stream, DrafterHello(MEMBER.incarnation, "scripted", "", 64, 16, kind="model")
        )

    def step(self) -> None:
        super().step()
        for action in self._repeated:
            action()
        self._talk()

    # --- the client's network ---

    def dial(self, link: DrafterLink, client: DraftClient) -> _Stream:
        self._stream = _Stream(link)
        return self._stream

    def repeat(self, period_s: float, action: Callable[[], None]) -> None:
        self._repeated.append(action)

    async def close(self) -> None:
        raise AssertionError("nobody closes this client")

    # --- both ends ---

    def _take(self, output: EngineOutput) -> None:
        super()._take(output)
        self.client.apply(output.orders)
        for verdict in output.verdicts:
            self.verdicts.append(verdict)
            self.client.record(verdict)
        self._talk()

    def _talk(self) -> None:
        assert self._stream is not None
        while self._stream.link.has_news:
            batch = self._stream.link.take_batch(self.now())
            self.client.received(self._stream, DrafterBatch(drafts=tuple(self._answer_to(batch))))

    def _answer_to(self, batch: TargetBatch) -> list[SessionDraft]:
        for opening in batch.opens:
            self.open_sessions[opening.session] = ScriptedSession(opening, list(opening.token_ids))
        for commit in batch.commits:
            self.open_sessions[commit.session].token_ids += commit.token_ids
        for number in batch.pauses:
            self.open_sessions[number].paused = True
        for number in batch.resumes:
            self.open_sessions[number].paused = False
        for number in batch.closes:
            del self.open_sessions[number]
        asked = (item.session for item in (*batch.opens, *batch.commits))
        owing = dict.fromkeys((*asked, *batch.resumes))
        sessions = [self.open_sessions[n] for n in owing if n in self.open_sessions]
        return [self._drafted(session) for session in sessions if not session.paused]

    def _drafted(self, session: ScriptedSession) -> SessionDraft:
        depth = session.opening.num_speculative_tokens
        return draft_of(session, chain_of(self.continuation(session.token_ids, depth)))
