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
    tenant: str = ""
    """Sessions of one tenant may draft from one another's outputs; empty is no tenant."""
    prediction_ids: tuple[int, ...] = ()
    """What the client said the output would be."""
    wants_laws: bool = False
    """Each draft shall be drawn by noise of the drafter's own and come with its law; no branches.
    Asked of drafters with a model only."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Draft for a session, from its last committed token on."""

    session_key: int
    num_tokens: int
    """Longest chain wanted."""
    num_branches: int = 0
    """Likely corrections wanted beside the chain: its runners-up, each with what would follow it.
    A drafter that knows none leaves them out."""
    branch_len: int = 0
    """Longest branch wanted, the correction included."""
    least_survival: float = 0.0
    """The chain and its branches end at a token whose chance to be accepted, with all before it,
    is lower. A drafter whose tokens cost nothing need not look at it."""


class Drafter(Protocol):
    """See the module. A session that was not begun, or has ended, is a KeyError."""

    def begin(self, session: DraftSession) -> None:
        """Take a new session."""

    def extend(self, session_key: int, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""

    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[tuple[DraftNode, ...] | None]:
        """One trie per request, in order, from the session's last committed token on: the chain,
        then the branches. A chain shorter than what was asked for has ended: nothing will follow it
        before tokens are committed. None: there is much to read yet, ask again."""

    def end(self, session_key: int) -> None:
        """Forget a session."""
