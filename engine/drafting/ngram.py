"""The n-gram drafter: proposes what followed the same n-gram earlier in the sequence.

Known as prompt lookup decoding. Each session has its own index; nothing is shared, so one tenant's
text can never show in another's drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cluster.types import DraftNode
from engine.drafting.interface import DraftRequest, DraftSession


class NgramDrafter:
    """A Drafter without a model; see engine/drafting/interface.py."""

    def __init__(self, max_ngram: int, min_ngram: int, min_survival: float = 0.0) -> None:
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._min_survival = min_survival
        self._sessions: dict[int, _NgramIndex] = {}

    def begin(self, session: DraftSession) -> None:
        index = _NgramIndex(self._max_ngram, self._min_ngram)
        index.extend(session.token_ids)
        self._sessions[session.session_key] = index

    def extend(self, session_key: int, token_ids: Sequence[int]) -> None:
        self._sessions[session_key].extend(token_ids)

    def draft(self, requests: Sequence[DraftRequest]) -> list[tuple[DraftNode, ...]]:
        return [
            self._sessions[request.session_key].draft(request.num_tokens, self._min_survival)
            for request in requests
        ]

    def end(self, session_key: int) -> None:
        del self._sessions[session_key]


class _NgramIndex:
    """The tokens of one session, and where each n-gram was last continued.

    Invariant: an n-gram is in the index once a token follows it; so a look-up of the sequence's own
    end finds the latest earlier occurrence, never itself.
    """

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._token_ids = array("I")
        self._continuations: dict[bytes, int] = {}
        """n-gram -> position of the token that followed it last. Keys differ in length with n."""
        self._predicted: tuple[int, ...] = ()
        """What the last draft said about the tokens from here on."""
        self._matched_len = 0
        """n of the match that the last draft came from."""
        self._num_right = [0] * (max_ngram + 1)
        self._num_judged = [0] * (max_ngram + 1)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens, about a microsecond each."""
        self._judge(token_ids)
        for token_id in token_ids:
            position = len(self._token_ids)
            for n in range(self._min_ngram, min(self._max_ngram, position) + 1):
                self._continuations[self._token_ids[position - n :].tobytes()] = position
            self._token_ids.append(token_id)

    def draft(self, num_tokens: int, min_survival: float) -> tuple[DraftNode, ...]:
        """A chain of at most `num_tokens` tokens from the longest match, or nothing. What is too
        unlikely is not proposed, but still judged, so that a text which begins to repeat itself is
        noticed."""
        self._predicted = self._continue(num_tokens)
        confidence = self._confidence(self._matched_len)
        nodes: list[DraftNode] = []
        survival = confidence
        while len(nodes) < len(self._predicted) and survival >= min_survival:
            nodes.append(DraftNode(self._predicted[len(nodes)], len(nodes) - 1, confidence))
            survival *= confidence
        return tuple(nodes)

    def _continue(self, num_tokens: int) -> tuple[int, ...]:
        end = len(self._token_ids)
        for n in range(min(self._max_ngram, end), self._min_ngram - 1, -1):
            source = self._continuations.get(self._token_ids[end - n :].tobytes())
            if source is not None:
                self._matched_len = n
                period = end - source
                # A match that runs into the end goes on through what was just proposed, as a
                # repetition would.
                return tuple(self._token_ids[source + i % period] for i in range(num_tokens))
        return ()

    def _judge(self, token_ids: Sequence[int]) -> None:
        """Compare what was committed with what was predicted, up to the first difference."""
        for predicted, token_id in zip(self._predicted, token_ids, strict=False):
            self._num_judged[self._matched_len] += 1
            if predicted != token_id:
                self._predicted = ()
                return
            self._num_right[self._matched_len] += 1
        self._predicted = self._predicted[len(token_ids) :]

    def _confidence(self, n: int) -> float:
        """Mean of a Beta posterior over this session's drafts from matches of `n` tokens; the
        prior trusts a match more the longer it is."""
        return (self._num_right[n] + n) / (self._num_judged[n] + n + 1)
