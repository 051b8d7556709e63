"""The verifier's loop in small: propose from the trie, verify against a known text, commit.

The text is a function of position alone, so any draft that changes the output shows at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.types import Draft
from tests.support.draft_driver import PROMPT, DraftDriver
from verifier_service.draft_trie import DraftOutcome, DraftTrie
from verifier_service.events import (
    DraftArrived,
    DraftOrders,
    DraftSessionLive,
    DraftSessionLost,
)

VOCAB_SIZE = 40
DEADLINE_S = 0.02


def text(position: int) -> int:
    """The target's token: mostly a cycle, with a surprise now and then."""
    return (position * position) % 7 if position % 11 == 0 else position % 5 + 10


@dataclass
class ToyVerifier:
    """One sequence. `waited_s` is all the time spent on waiting for drafts."""

    driver: DraftDriver
    seq: int
    token_ids: list[int] = field(default_factory=lambda: list(PROMPT))
    num_drafted: int = 0
    num_accepted: int = 0
    num_late: int = 0
    waited_s: float = 0.0
    outcomes: list[DraftOutcome] = field(default_factory=list)

    async def generate(
        self, num_tokens: int, before_step: Callable[[int], object] = lambda step: None
    ) -> list[int]:
        """The generated tokens; the session is closed at the end."""
        trie = DraftTrie(PROMPT, VOCAB_SIZE)
        self.driver.open(self.seq)
        live = late = resynced = False
        num_read = step = 0
        end = len(PROMPT) + num_tokens
        while len(self.token_ids) < end:
            waiting = before_step(step)
            if asyncio.iscoroutine(waiting):
                await waiting
            deadline = time.monotonic() + DEADLINE_S
            while True:
                for event in self.driver.inbox[num_read:]:
                    num_read += 1
                    if isinstance(event, DraftSessionLive) and event.seq == self.seq:
                        live = True
                    elif isinstance(event, DraftSessionLost) and event.seq == self.seq:
                        live = False
                    elif isinstance(event, DraftArrived) and event.seq == self.seq:
                        resynced = self._take(trie, event.draft, resynced)
                        late &= not trie.answered
                if not live or late or trie.answered:
                    break
                if time.monotonic() > deadline:
                    late = True
                    self.num_late += 1
                    break
                start = time.monotonic()
                await asyncio.sleep(0.0005)
                self.waited_s += time.monotonic() - start
            chain = trie.best_chain(min(8, end - len(self.token_ids) - 1))
            tokens = self._verify(chain)
            trie.commit(tokens)
            self.token_ids += tokens
            self.driver.commit(*tokens, seqs=[self.seq])
            await asyncio.sleep(0)
            step += 1
        self.driver.close(self.seq)
        return self.token_ids[len(PROMPT) :]

    def _take(self, trie: DraftTrie, draft: Draft, resynced: bool) -> bool:
        outcome = trie.insert(draft)
        self.outcomes.append(outcome)
        if outcome is DraftOutcome.UNKNOWN_ANCHOR and not resynced:
            self.driver.client.apply(DraftOrders(resyncs=(self.seq,)))
        return outcome is DraftOutcome.UNKNOWN_ANCHOR

    def _verify(self, chain: tuple[int, ...]) -> list[int]:
        tokens: list[int] = []
        for draft_id in (*chain, None):
            tokens.append(text(len(self.token_ids) + len(tokens)))
            if tokens[-1] != draft_id:
                break
        self.num_drafted += len(chain)
        self.num_accepted += len(tokens) - 1
        return tokens
