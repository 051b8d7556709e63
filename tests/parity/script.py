"""A drafter's script: it watches what answers become, and knows them when they are asked again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cluster.protocol.messages import SessionDraft
from tests.support.scripted_drafter import ScriptedSession, chain_of, draft_of, nothing

EOS = 2
"""Of the tiny models and of the embedded one."""
SPOILT_PERIOD = 3


class Script:
    """`watch`, then `right` and `nearly_right`: each an Answer of a ScriptedDrafter."""

    def __init__(self) -> None:
        self._seen: defaultdict[int, list[ScriptedSession]] = defaultdict(list)
        """By request key. A session's tokens grow after it was noted."""

    def watch(self, session: ScriptedSession) -> list[SessionDraft]:
        """Drafts nothing."""
        seen = self._seen[session.opening.request_key]
        if not any(session is one for one in seen):
            seen.append(session)
        return nothing(session)

    def right(self, session: ScriptedSession) -> list[SessionDraft]:
        """What comes next, as many tokens as may be proposed."""
        return [draft_of(session, chain_of(self._next(session)))]

    def nearly_right(self, session: ScriptedSession) -> list[SessionDraft]:
        """The token at every third position is another, so that drafts fail at each of their
        places."""
        first = len(session.token_ids)
        proposed = [
            token_id ^ 1 if (first + place) % SPOILT_PERIOD == 0 else token_id
            for place, token_id in enumerate(self._next(session))
        ]
        return [draft_of(session, chain_of(proposed))]

    def _next(self, session: ScriptedSession) -> Sequence[int]:
        committed = session.token_ids
        num_known = len(committed)
        known = max(
            (
                one.token_ids[num_known:]
                for one in self._seen[session.opening.request_key]
                if one.token_ids[:num_known] == committed
            ),
            key=len,
            default=[],
        )
        # The token that ends an answer is told to no drafter.
        return [*known, EOS][: session.opening.num_speculative_tokens]
