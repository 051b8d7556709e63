"""The verifier's loop in small: propose from the trie, verify against a known text, commit.

The text is a function of position alone, so any draft that changes the output shows at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

from cluster.types import Draft
from tests.support.draft_driver import PROMPT, DraftDriver
from tests.support.polling import eventually
from verifier_service.draft_trie import DraftOutcome, DraftTrie
from verifier_service.events import (
    DraftArrived,
    DraftOrders,
    DraftSessionLive,
    DraftSessionLost,
    EngineInput,
)

VOCAB_SIZE = 40
DEADLINE_S = 0.02

Pause = Callable[[int], Coroutine[object, object, object]]


def text(position: int) -> int:
    """The target's token: mostly a cycle, with a surprise now and then."""
    return (position * position) % 7 if position % 11 == 0 else position % 5 + 10


def step_time(seconds: float) -> Pause:
    """Every step takes this long."""
    return lambda step: asyncio.sleep(seconds)


def once_live(driver: DraftDriver, seq: int) -> Pause:
    """The first step comes when the sequence has a drafter."""

    async def wait(step: int) -> None:
        if step == 0:
            await eventually(lambda: driver.drafter_of(seq))

    return wait


class ToyVerifier:
    """One sequence."""

    def __init__(self, driver: DraftDriver, seq: int, deadline_s: float = DEADLINE_S) -> None:
        self.token_ids = list(PROMPT)
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_late = 0
        self.longest_wait_s = 0.0
        self.outcomes: list[DraftOutcome] = []
        self._driver = driver
        self._deadline_s = deadline_s
        self._seq = seq
        self._trie = DraftTrie(PROMPT, VOCAB_SIZE)
        self._num_read = 0
        self._live = self._late = self._resynced = False

    async def generate(self, num_tokens: int, before_step: Pause) -> list[int]:
        """The generated tokens; the session is closed at the end."""
        self._driver.open(self._seq)
        end = len(PROMPT) + num_tokens
        step = 0
        while len(self.token_ids) < end:
            await before_step(step)
            await self._wait_for_draft()
            tokens = self._verify(self._trie.best_chain(min(8, end - len(self.token_ids) - 1)))
            self._trie.commit(tokens)
            self.token_ids += tokens
            self._driver.commit(*tokens, seqs=[self._seq])
            step += 1
        self._driver.close(self._seq)
        return self.token_ids[len(PROMPT) :]

    async def _wait_for_draft(self) -> None:
        """Up to the deadline; not at all once a draft was late, until one comes in time again."""
        start = time.monotonic()
        self._receive()
        while self._live and not self._late and not self._settled:
            if time.monotonic() - start > self._deadline_s:
                self._late = True
                self.num_late += 1
            else:
                await asyncio.sleep(0.0005)
                self._receive()
        self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - start)

    @property
    def _settled(self) -> bool:
        return self._trie.answered or self._trie.holds_chain(8)

    def _receive(self) -> None:
        for event in self._driver.inbox[self._num_read :]:
            self._num_read += 1
            if event.seq == self._seq:  # type: ignore[union-attr]
                self._handle(event)

    def _handle(self, event: EngineInput) -> None:
        if isinstance(event, DraftSessionLive):
            self._live, self._late = True, False
        elif isinstance(event, DraftSessionLost):
            self._live = False
        elif isinstance(event, DraftArrived):
            self._take(event.draft)
            self._late &= not self._settled

    def _take(self, draft: Draft) -> None:
        outcome = self._trie.insert(draft)
        self.outcomes.append(outcome)
        unknown = outcome is DraftOutcome.UNKNOWN_ANCHOR
        if outcome is DraftOutcome.MALFORMED:
            self._driver.client.apply(DraftOrders(malformed=(self._seq,)))
        elif unknown and not self._resynced:
            self._driver.client.apply(DraftOrders(resyncs=(self._seq,)))
        self._resynced = unknown

    def _verify(self, chain: tuple[int, ...]) -> list[int]:
        tokens: list[int] = []
        for draft_id in (*chain, None):
            tokens.append(text(len(self.token_ids) + len(tokens)))
            if tokens[-1] != draft_id:
                break
        self.num_drafted += len(chain)
        self.num_accepted += len(tokens) - 1
        return tokens
