"""The prediction drafter: proposes what the client said the answer would be.

A cursor runs through the prediction beside the answer. Where the two part, it looks for the place
where they meet again: the longest stretch of the prediction that agrees with the answer's last
tokens, near where the answer would be if tokens had been replaced one for one. So an edited file
matches again right behind the edit, whether the edit replaced, inserted, removed or moved text.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence

from cluster.types import DraftNode
from engine.drafting.interface import DraftRequest, DraftSession

_MIN_SURVIVAL = 0.1
"""A chain ends before its chance to be accepted as a whole falls below this."""
_CONFIRMED_LEN = 3
"""Tokens that must agree in a row before a place counts as found."""
_MAX_MATCH_LEN = 8
"""Tokens before a place that are compared."""
_NUM_AHEAD = 16
_NUM_BEHIND = 4
"""Places tried, ahead of the last token that agreed and behind it: text may have been moved up."""
_PRIOR = (0.35, 0.5, 0.65, 0.75, 0.8, 0.85, 0.88, 0.89, 0.97)
"""Index j: chance that the next token agrees when j did in a row, before anything was seen."""
_PRIOR_WEIGHT = 16.0
_TRUST_IN_START = 6
"""An answer is trusted to begin as predicted as if so many tokens had agreed already."""


class PredictionDrafter:
    """A Drafter without a model; see engine/drafting/interface.py. Sessions share nothing. One
    without a prediction proposes nothing."""

    def __init__(self) -> None:
        self._sessions: dict[int, _Cursor] = {}

    def begin(self, session: DraftSession) -> None:
        cursor = _Cursor(session.prediction_ids)
        cursor.follow(session.token_ids[session.num_prompt_tokens :])
        self._sessions[session.session_key] = cursor

    def extend(self, session_key: int, token_ids: Sequence[int]) -> None:
        self._sessions[session_key].follow(token_ids)

    def draft(self, requests: Sequence[DraftRequest]) -> list[tuple[DraftNode, ...]]:
        return [
            self._sessions[request.session_key].propose(request.num_tokens) for request in requests
        ]

    def end(self, session_key: int) -> None:
        del self._sessions[session_key]

    def follow(self, session_key: int, token_ids: Sequence[int]) -> tuple[bool, ...]:
        """`extend`, and for each token whether the prediction had it next."""
        return self._sessions[session_key].follow(token_ids)

    def num_resyncs(self, session_key: int) -> int:
        """How often the answer left the prediction and was found in it again."""
        return self._sessions[session_key].num_resyncs


class _Cursor:
    """Where an answer stands in its prediction.

    `_anchor` is the place behind the last token that agreed for certain, and `_num_since` counts
    the answer's tokens since then; so without any better sign the answer is at their sum.
    """

    def __init__(self, prediction_ids: Sequence[int]) -> None:
        self._prediction = array("I", prediction_ids)
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        """By token: where it stands in the prediction, ascending."""
        for place, token_id in enumerate(prediction_ids):
            self._places[token_id].append(place)
        self._last: deque[int] = deque(maxlen=_MAX_MATCH_LEN)
        """Of the answer."""
        self._next = 0
        """Place of the token that is expected next."""
        self._run_len = _TRUST_IN_START
        """Tokens that agreed up to `_next`."""
        self._anchor = 0
        self._num_since = 0
        self._is_lost = False
        self.num_resyncs = 0
        self._num_right = [0] * len(_PRIOR)
        self._num_judged = [0] * len(_PRIOR)

    def follow(self, token_ids: Sequence[int]) -> tuple[bool, ...]:
        """Take the answer's next tokens; for each, whether it was expected."""
        return tuple([self._step(token_id) for token_id in token_ids])

    def propose(self, num_tokens: int) -> tuple[DraftNode, ...]:
        """What the prediction holds from here on, as far as it is likely."""
        chances = [self._chance(run_len) for run_len in range(len(_PRIOR))]
        nodes: list[DraftNode] = []
        run_len, survival = self._run_len, 1.0
        for token_id in self._prediction[self._next : self._next + num_tokens]:
            chance = chances[min(run_len, len(_PRIOR) - 1)]
            survival *= chance
            if survival < _MIN_SURVIVAL:
                break
            nodes.append(DraftNode(token_id, len(nodes) - 1, chance))
            run_len += 1
        return tuple(nodes)

    def _step(self, token_id: int) -> bool:
        self._last.append(token_id)
        self._num_since += 1
        if self._next < len(self._prediction):
            expected = self._prediction[self._next] == token_id
            bucket = min(self._run_len, len(_PRIOR) - 1)
            self._num_judged[bucket] += 1
            self._num_right[bucket] += expected
        else:
            expected = False
        if expected:
            self._next += 1
            self._run_len += 1
        else:
            self._is_lost = True
            self._next, self._run_len = self._find(token_id)
        if self._run_len >= _CONFIRMED_LEN:
            self._settle()
        return expected

    def _settle(self) -> None:
        self.num_resyncs += self._is_lost
        self._is_lost = False
        self._anchor, self._num_since = self._next, 0

    def _find(self, token_id: int) -> tuple[int, int]:
        """The best place to go on from, and how many tokens before it agree."""
        likeliest = self._anchor + self._num_since
        places = self._places.get(token_id, [])
        middle = bisect_left(places, self._anchor)
        best, best_score = (min(likeliest, len(self._prediction)), 0), 0.0
        for place in places[max(0, middle - _NUM_BEHIND) : middle + _NUM_AHEAD]:
            match_len = self._match_len(place)
            # Half a token less for each doubling of the distance: a long match is no chance hit
            # anywhere, a short one only nearby.
            score = match_len - 0.5 * math.log2(1 + abs(place + 1 - likeliest))
            if score > best_score:
                best, best_score = (place + 1, match_len), score
        return best

    def _match_len(self, place: int) -> int:
        """How many of the answer's last tokens stand before and at `place`."""
        length = 0
        for token_id in reversed(self._last):
            if place < length or self._prediction[place - length] != token_id:
                break
            length += 1
        return length

    def _chance(self, run_len: int) -> float:
        """Mean of a Beta posterior over this session."""
        hits = self._num_right[run_len] + _PRIOR_WEIGHT * _PRIOR[run_len]
        return hits / (self._num_judged[run_len] + _PRIOR_WEIGHT)
