"""The suffix drafter: proposes what followed the longest earlier match of the sequence's end.

It looks in the sequence itself, prompt and output, and in the recent outputs of the same tenant.
Matches are followed token by token, so nothing is ever searched twice: one that goes on grows by
one token, and new ones are found through chains of equal n-grams, as LZ77 compressors do it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cluster.types import DraftNode
from engine.drafting.interface import DraftRequest, DraftSession

_TOKEN_BITS = 32
_END_OF_TEXT = (1 << _TOKEN_BITS) - 1
"""Stands behind each remembered output; no vocabulary has this id."""
_NUM_BUCKETS = 17
"""Ranges of match length that are judged apart: 0 to 15, and all above."""


class SuffixDrafter:
    """A Drafter without a model; see engine/drafting/interface.py.

    Tenants share nothing: a session is offered its own tokens and what its own tenant's sessions
    generated. Sessions without a tenant have no memory but themselves, unless `remember_unsalted`
    makes them one tenant.
    """

    def __init__(
        self,
        min_match: int,
        max_sources: int,
        min_survival: float,
        max_remembered_tokens: int,
        remember_unsalted: bool,
    ) -> None:
        self._min_match = min_match
        self._max_sources = max_sources
        self._min_survival = min_survival
        self._remember_unsalted = remember_unsalted
        self._memory = _Memory(min_match, max_remembered_tokens)
        self._sessions: dict[int, _Session] = {}

    @property
    def num_remembered_tokens(self) -> int:
        """Over all tenants."""
        return self._memory.num_tokens

    def begin(self, session: DraftSession) -> None:
        texts = [_Text(self._min_match)]
        remembered = None
        if session.tenant or self._remember_unsalted:
            remembered = self._memory.of(session.tenant)
            texts.append(remembered)
        self._sessions[session.session_key] = _Session(
            texts, session.num_prompt_tokens, session.tenant, remembered, self._max_sources
        )
        self._sessions[session.session_key].begin(session.token_ids)

    def extend(self, session_key: int, token_ids: Sequence[int]) -> None:
        self._sessions[session_key].extend(token_ids)

    def draft(self, requests: Sequence[DraftRequest]) -> list[tuple[DraftNode, ...]]:
        return [
            self._sessions[request.session_key].draft(request.num_tokens, self._min_survival)
            for request in requests
        ]

    def end(self, session_key: int) -> None:
        session = self._sessions.pop(session_key)
        if session.remembered is not None:
            self._memory.remember(session.tenant, session.output)


class _Text:
    """Tokens that grow at the end and may be dropped at the start, and where each n-gram occurred.

    Positions count from the first token that ever was. The occurrences of an n-gram form a chain,
    the latest first; a link to a position that was dropped ends it.
    """

    def __init__(self, ngram_len: int) -> None:
        self.ngram_len = ngram_len
        self._mask = (1 << _TOKEN_BITS * ngram_len) - 1
        self._tokens = array("I")
        self._start = 0
        """Position of the first token that is still there."""
        self._latest: dict[int, int] = {}
        """n-gram, as one number -> position behind its latest occurrence."""
        self._earlier = array("q")
        """Per token: position behind the earlier occurrence of the n-gram that ends with it."""
        self._ngram = 0
        self._num_fresh = 0
        """Tokens that the n-gram may hold: none from before the last end of a text."""

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def end(self) -> int:
        """Position of the next token."""
        return self._start + len(self._tokens)

    def append(self, token_ids: Sequence[int]) -> None:
        """About half a microsecond each."""
        position = self.end
        self._tokens.extend(token_ids)
        for token_id in token_ids:
            position += 1
            self._ngram = (self._ngram << _TOKEN_BITS | token_id) & self._mask
            self._num_fresh = 0 if token_id == _END_OF_TEXT else self._num_fresh + 1
            if self._num_fresh < self.ngram_len:
                self._earlier.append(-1)
                continue
            self._earlier.append(self._latest.get(self._ngram, -1))
            self._latest[self._ngram] = position

    def drop(self, num_tokens: int) -> None:
        """Forget the oldest tokens."""
        ngram = 0
        for index, token_id in enumerate(self._tokens[:num_tokens]):
            ngram = (ngram << _TOKEN_BITS | token_id) & self._mask
            if self._latest.get(ngram) == self._start + index + 1:
                del self._latest[ngram]
        del self._tokens[:num_tokens]
        del self._earlier[:num_tokens]
        self._start += num_tokens

    def token(self, position: int) -> int:
        """The token there; the end of text where there is none (any more)."""
        index = position - self._start
        return self._tokens[index] if 0 <= index < len(self._tokens) else _END_OF_TEXT

    def since(self, position: int) -> array[int]:
        """The tokens from there on."""
        return self._tokens[position - self._start :]

    def ngram_at_end(self) -> int | None:
        """The n-gram that the tokens end with."""
        return self._ngram if self._num_fresh >= self.ngram_len else None

    def occurrences(self, ngram: int) -> Iterator[int]:
        """Positions behind its occurrences, the latest first."""
        position = self._latest.get(ngram, -1)
        while position > self._start:
            yield position
            position = self._earlier[position - 1 - self._start]


@dataclass(slots=True)
class _Match:
    """A place whose tokens before it are those that a session ends with."""

    text: _Text
    position: int
    """Of what followed."""
    length: int


class _Session:
    """The tokens of one session, the first of `texts`, and every place that they match now."""

    def __init__(
        self,
        texts: list[_Text],
        num_prompt_tokens: int,
        tenant: str,
        remembered: _Text | None,
        max_sources: int,
    ) -> None:
        self.tenant = tenant
        self.remembered = remembered
        self._texts = texts
        self._own = texts[0]
        self._num_prompt_tokens = num_prompt_tokens
        self._max_sources = max_sources
        self._matches: list[_Match] = []
        """The longest first, at most `max_sources`."""
        self._predicted: list[tuple[int, int]] = []
        """What the last draft said about the tokens from here on, and of which bucket it was."""
        self._num_right = [0] * _NUM_BUCKETS
        self._num_judged = [0] * _NUM_BUCKETS

    @property
    def output(self) -> array[int]:
        """What was generated."""
        return self._own.since(self._num_prompt_tokens)

    def begin(self, token_ids: Sequence[int]) -> None:
        self._own.append(token_ids)
        self._find_matches()
        for match in self._matches:
            match.length = self._length(match)
        self._matches.sort(key=lambda match: -match.length)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._judge(token_ids)
        for token_id in token_ids:
            going_on = [m for m in self._matches if m.text.token(m.position) == token_id]
            for match in going_on:
                match.position += 1
                match.length += 1
            self._matches = going_on
            self._own.append((token_id,))
            if len(going_on) < self._max_sources:
                self._find_matches()

    def draft(self, num_tokens: int, min_survival: float) -> tuple[DraftNode, ...]:
        """The continuation of the longest match, as far as it is likely. A token is the likelier
        the longer its match, the more matches agree on it, and the more often this session's
        matches of that length were right."""
        self._predicted = []
        agreeing = self._matches
        nodes: list[DraftNode] = []
        survival = 1.0
        while len(nodes) < num_tokens and agreeing:
            depth = len(nodes)
            proposals = [self._proposed(match, depth) for match in agreeing]
            token_id = proposals[0]
            if token_id == _END_OF_TEXT:
                break
            num_before = len(agreeing)
            if num_before > 1:
                agreeing = [
                    m for m, other in zip(agreeing, proposals, strict=True) if other == token_id
                ]
            bucket = min(agreeing[0].length + depth, _NUM_BUCKETS - 1)
            confidence = self._trust(bucket) * len(agreeing) / num_before
            self._predicted.append((token_id, bucket))
            survival *= confidence
            if survival < min_survival:
                break  # Not proposed, but judged, so that a text that begins to repeat is noticed.
            nodes.append(DraftNode(token_id, depth - 1, confidence))
        return tuple(nodes)

    def _proposed(self, match: _Match, depth: int) -> int:
        """What follows a match. One that runs into the session's own end goes on through what was
        just proposed, as a repetition would."""
        if match.text is self._own:
            depth %= self._own.end - match.position
        return match.text.token(match.position + depth)

    def _find_matches(self) -> None:
        """Add places that are not followed yet. They match by an n-gram and no more: with one more
        token they would be followed already, unless there were too many."""
        ngram = self._own.ngram_at_end()
        if ngram is None:
            return
        known = {(id(match.text), match.position) for match in self._matches}
        for text in self._texts:
            for position in text.occurrences(ngram):
                if len(self._matches) >= self._max_sources:
                    return
                here = text is self._own and position == text.end
                if not here and (id(text), position) not in known:
                    self._matches.append(_Match(text, position, self._own.ngram_len))

    def _length(self, match: _Match) -> int:
        length = match.length
        while (
            length < _NUM_BUCKETS
            and (token_id := match.text.token(match.position - length - 1)) != _END_OF_TEXT
            and token_id == self._own.token(self._own.end - length - 1)
        ):
            length += 1
        return length

    def _judge(self, token_ids: Sequence[int]) -> None:
        """Compare what was committed with what was predicted, up to the first difference."""
        for (predicted, bucket), token_id in zip(self._predicted, token_ids, strict=False):
            self._num_judged[bucket] += 1
            if predicted != token_id:
                self._predicted = []
                return
            self._num_right[bucket] += 1
        self._predicted = self._predicted[len(token_ids) :]

    def _trust(self, bucket: int) -> float:
        """Mean of a Beta posterior over this session; the prior trusts a match more the longer it
        is."""
        return (self._num_right[bucket] + bucket) / (self._num_judged[bucket] + bucket + 1)


@dataclass(slots=True)
class _Tenant:
    """What one tenant's sessions generated, and how long each of them was, the oldest first."""

    text: _Text
    lengths: deque[int] = field(default_factory=deque)


class _Memory:
    """Outputs by tenant, at most `max_tokens` of all together. The tenant that was not used for the
    longest forgets first, its oldest output first."""

    def __init__(self, ngram_len: int, max_tokens: int) -> None:
        self._ngram_len = ngram_len
        self._max_tokens = max_tokens
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self.num_tokens = 0

    def of(self, tenant: str) -> _Text:
        """A tenant's text, to be read; it lives on if the tenant is forgotten meanwhile."""
        if tenant not in self._tenants:
            return _Text(self._ngram_len)
        self._tenants.move_to_end(tenant)
        return self._tenants[tenant].text

    def remember(self, tenant: str, output: array[int]) -> None:
        """Add an output, of one too long its end."""
        kept = output[-(self._max_tokens - 1) :] if self._max_tokens > 1 else output[:0]
        if not kept:
            return
        kept.append(_END_OF_TEXT)
        record = self._tenants.setdefault(tenant, _Tenant(_Text(self._ngram_len)))
        self._tenants.move_to_end(tenant)
        record.text.append(kept)
        record.lengths.append(len(kept))
        self.num_tokens += len(kept)
        while self.num_tokens > self._max_tokens:
            self._forget_one()

    def _forget_one(self) -> None:
        name, oldest = next(iter(self._tenants.items()))
        length = oldest.lengths.popleft()
        oldest.text.drop(length)
        self.num_tokens -= length
        if not oldest.lengths:
            del self._tenants[name]
