"""What a drafter is: something that proposes the next tokens of many sessions at once.

A drafter keeps one state per session, and that state is a function of the session's committed
tokens alone; so a session can be begun anew anywhere, at any time, with nothing but its tokens.
All calls come from one compute thread. `begin` and `extend` may be lazy: a drafter that runs a
model prefills inside `draft`, batched over the sessions of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.types import DraftNode, SamplingParams


@dataclass(frozen=True, slots=True)
class DraftSession:
    """One sequence that is to be drafted for."""

    session_key: int
    """Unique among the drafter's sessions, chosen by its caller, never used again."""
    token_ids: tuple[int, ...]
    """All committed tokens: prompt, then what was generated."""
    num_prompt_tokens: int
    request_key: int
    """Key of the coupled noise, so that a model drafter draws what the verifier would draw."""
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Draft for a session, from its last committed token on."""

    session_key: int
    num_tokens: int
    """Longest chain wanted."""


class Drafter(Protocol):
    """See the module. A session that was not begun, or has ended, is a KeyError."""

    def begin(self, session: DraftSession) -> None:
        """Take a new session."""

    def extend(self, session_key: int, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[tuple[DraftNode, ...]]:
        """One trie per request, in order; empty where there is nothing to propose."""

    def end(self, session_key: int) -> None:
        """Forget a session."""
