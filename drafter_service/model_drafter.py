"""The model drafter: a causal language model drafts for many sessions, batched.

It decodes as the verifier does: its own distribution, the session's sampling parameters, the same
noise at the same positions; so it tends to draw the token that the verifier will draw.

A session is its committed tokens. The rest is work that may be dropped at any time and done again:
its KV, and its tail, the tokens that were drafted and are neither confirmed nor contradicted yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer

from cluster.config import KVCacheConfig, ModelConfig
from cluster.types import DraftNode, SamplingParams
from engine.adjustments import Adjustments, adjustments_of
from engine.decoder import SequenceSlice
from engine.drafting.interface import DraftRequest, DraftSession
from engine.kv_cache import SequenceCache
from engine.loader import load_model
from engine.model_runner import ModelRunner
from engine.processors import target_logits
from engine.target import Block, draw

_CPU_STEP_TOKENS = 32
"""A CPU takes a prompt at most a quarter faster in larger pieces, and drafting waits for each."""
_ACCELERATOR_STEP_TOKENS = 512
_MAX_PREFILL_FORWARDS = 32
"""Forwards of one call beyond those that the longest chain takes."""
_LEAST_CONFIDENCE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A token that the draft model drew."""

    token_id: int
    confidence: float


@dataclass(slots=True, eq=False)
class _Session:
    """Invariant: KV is computed for the first `num_computed` of the committed tokens and the tail,
    and never for the last of all, since its logits are still to be taken. The slots of committed
    tokens are committed, those of the tail pending."""

    request_key: int
    sampling: SamplingParams
    adjustments: Adjustments | None
    token_ids: list[int] = field(default_factory=list)
    """Committed."""
    tail: list[_Drawn] = field(default_factory=list)
    """What the model draws after them."""
    cache: SequenceCache | None = None
    readable: bool = True
    """Every committed token is in the draft model's vocabulary."""

    @property
    def num_computed(self) -> int:
        return 0 if self.cache is None else self.cache.num_slots

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) + len(self.tail) - self.num_computed

    def uncomputed_ids(self, limit: int) -> list[int]:
        """The first `limit` tokens without KV."""
        start, num_committed = self.num_computed, len(self.token_ids)
        token_ids = self.token_ids[start : start + limit]
        tail_start = max(0, start - num_committed)
        tail_end = tail_start + limit - len(token_ids)
        return token_ids + [drawn.token_id for drawn in self.tail[tail_start:tail_end]]

    def block(self) -> Block:
        """How the token after the tail is drawn."""
        tail_ids = [drawn.token_id for drawn in self.tail]
        return Block(
            self.sampling, self.request_key, len(self.token_ids), tail_ids, 1, self.adjustments
        )


@dataclass(slots=True, eq=False)
class _Chain:
    """One request of a draft call."""

    session: _Session
    num_tokens: int
    stopped: bool = False
    """It cannot grow in this call."""

    @property
    def finished(self) -> bool:
        return self.stopped or len(self.session.tail) >= self.num_tokens

    def nodes(self) -> tuple[DraftNode, ...]:
        return tuple(
            DraftNode(drawn.token_id, parent, drawn.confidence)
            for parent, drawn in enumerate(self.session.tail[: self.num_tokens], start=-1)
        )


@dataclass(frozen=True, slots=True)
class _Feed:
    """One chain's part of a forward. The slots of its tokens are reserved."""

    chain: _Chain
    cache: SequenceCache
    start: int
    token_ids: list[int]
    draws: bool
    """These reach the end of what is known: the next token is drawn."""

    def slice(self) -> SequenceSlice:
        return SequenceSlice(self.cache.block_table, self.start, self.token_ids, int(self.draws))


class ModelDrafter:
    """A Drafter over a ModelRunner that is its own; see engine/drafting/interface.py.

    A session whose KV had to make room for others computes it anew when it is drafted for again.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int | None = None,
        max_step_tokens: int | None = None,
    ) -> None:
        """`vocab_size`: ids from here on mean nothing to the tokenizer, though a padded model has
        rows for them; they are never proposed. `max_step_tokens`: tokens in one forward, of which
        prompts take what drafting leaves; by default what suits the device."""
        self._runner = runner
        self._kv = runner.kv
        self._vocab_size = min(vocab_size or runner.vocab_size, runner.vocab_size)
        self._max_step_tokens = max_step_tokens or _default_step_tokens(runner)
        self._sessions: dict[int, _Session] = {}
        """By key; those drafted for last are last, and may take the KV of those before them."""

    @classmethod
    def load(
        cls, model: ModelConfig, kv_cache: KVCacheConfig, max_step_tokens: int | None = None
    ) -> ModelDrafter:
        """Load the model and run it once, so that the first session pays for nothing."""
        unshared = kv_cache.model_copy(update={"prefix_cache": False})
        runner = ModelRunner(load_model(model), unshared)
        runner.warm_up()
        vocab_size = _tokenizer_size(runner.card.tokenizer_json)
        return cls(runner, vocab_size=vocab_size, max_step_tokens=max_step_tokens)

    @property
    def name(self) -> str:
        return self._runner.card.name

    @property
    def vocabulary(self) -> str:
        """Fingerprint of the tokenizer's vocabulary; how far the model pads it does not enter."""
        return self._runner.card.vocabulary

    @property
    def max_context_len(self) -> int:
        """Longest session, draft included."""
        return min(self._runner.max_model_len, self._kv.num_slots)

    # --- the interface -----------------------------------------------------------------------

    def begin(self, session: DraftSession) -> None:
        prompt_ids = session.token_ids[: session.num_prompt_tokens]
        adjustments = adjustments_of(session.sampling, prompt_ids, (), self._runner.vocab_size)
        state = _Session(session.request_key, session.sampling, adjustments)
        if adjustments is not None:
            adjustments.commit(session.token_ids[session.num_prompt_tokens :])
        self._sessions[session.session_key] = state
        self._append(state, session.token_ids)

    def extend(self, session_key: int, token_ids: Sequence[int]) -> None:
        session = self._sessions[session_key]
        num_agreeing = _common_prefix_len(session.tail, token_ids)
        if num_agreeing == len(token_ids):
            del session.tail[:num_agreeing]
        else:
            self._keep_computed(session, len(session.token_ids) + num_agreeing)
            session.tail.clear()
        if session.adjustments is not None:
            session.adjustments.commit(token_ids)
        self._append(session, token_ids)

    def draft(self, requests: Sequence[DraftRequest]) -> list[tuple[DraftNode, ...]]:
        """One chain per request, as far as it got. The call ends when those sessions are done that
        had at most one forward to catch up on: no long prompt holds them up, but goes on in the
        next call for its session, and until it is through its draft is empty."""
        chains = [self._chain(request) for request in requests]
        self._mark_used(requests)
        growing = [chain for chain in chains if not chain.finished]
        ready = [c for c in growing if c.session.num_uncomputed <= self._max_step_tokens]
        awaited = ready or growing
        depth = max((chain.num_tokens for chain in chains), default=0)
        for _ in range(depth + _MAX_PREFILL_FORWARDS):
            if all(chain.finished for chain in awaited):
                break
            self._step([chain for chain in growing if not chain.finished])
        return [chain.nodes() for chain in chains]

    def end(self, session_key: int) -> None:
        self._release(self._sessions.pop(session_key))

    # --- sessions ----------------------------------------------------------------------------

    def _append(self, session: _Session, token_ids: Sequence[int]) -> None:
        """These are committed; what of the KV is theirs is final."""
        session.token_ids += token_ids
        session.readable &= all(token_id < self._vocab_size for token_id in token_ids)
        self._settle(session)

    def _chain(self, request: DraftRequest) -> _Chain:
        session = self._sessions[request.session_key]
        room = self.max_context_len - len(session.token_ids)
        if session.readable and room > 0:
            return _Chain(session, min(request.num_tokens, room))
        self._release(session)  # It only grows, so it will never be drafted for again.
        return _Chain(session, 0)

    def _mark_used(self, requests: Sequence[DraftRequest]) -> None:
        """Within a call the first request goes before the others."""
        for request in reversed(requests):
            self._sessions[request.session_key] = self._sessions.pop(request.session_key)

    # --- KV ----------------------------------------------------------------------------------

    def _settle(self, session: _Session) -> None:
        """Make final what is computed of the committed tokens."""
        if (cache := session.cache) is not None:
            num_final = min(cache.num_slots, len(session.token_ids))
            self._kv.commit(cache, session.token_ids[cache.num_committed : num_final])

    def _keep_computed(self, session: _Session, num_tokens: int) -> None:
        """Take back the KV of all tokens but the first `num_tokens`."""
        if (cache := session.cache) is not None:
            self._kv.rollback(cache, max(0, cache.num_slots - num_tokens))

    def _reserve(self, session: _Session, num_tokens: int) -> SequenceCache | None:
        """Slots for the session's next tokens, at the cost of sessions that were used before it;
        None if even that is not enough."""
        cache = session.cache = session.cache or self._kv.open()
        while not self._kv.reserve(cache, num_tokens):
            victim = next((s for s in self._sessions.values() if s is session or s.cache), session)
            if victim is session:
                return None
            self._release(victim)
        return cache

    def _release(self, session: _Session) -> None:
        if session.cache is not None:
            self._kv.close(session.cache)
            session.cache = None

    # --- one forward -------------------------------------------------------------------------

    def _step(self, chains: Sequence[_Chain]) -> None:
        """Feed some of what is not computed yet, and draw where that reaches the end."""
        feeds = self._plan(chains)
        try:
            drawn = self._run(feeds)
        except BaseException:
            for feed in feeds:
                self._kv.rollback(feed.cache, len(feed.token_ids))
            raise
        for chain, token in drawn.items():
            if token is not None:
                chain.session.tail.append(token)
            else:
                chain.stopped = True
                self._keep_computed(chain.session, chain.session.num_computed - 1)
        for feed in feeds:
            self._settle(feed.chain.session)

    def _plan(self, chains: Sequence[_Chain]) -> list[_Feed]:
        """Fill a forward: who has least to catch up on goes first, so drafting before prompts."""
        room = max(self._max_step_tokens, 2 * len(chains))
        feeds: list[_Feed] = []
        for chain in sorted(chains, key=lambda chain: chain.session.num_uncomputed):
            session = chain.session
            start, token_ids = session.num_computed, session.uncomputed_ids(room)
            draws = len(token_ids) == session.num_uncomputed
            if not token_ids:
                break
            if (cache := self._reserve(session, len(token_ids))) is None:
                chain.stopped = True
                continue
            feeds.append(_Feed(chain, cache, start, token_ids, draws))
            room -= len(token_ids)
        return [feed for feed in feeds if self._still_holds(feed)]

    def _still_holds(self, feed: _Feed) -> bool:
        """Whether a chain that was planned has not lost its KV to one that goes before it."""
        feed.chain.stopped = feed.chain.session.cache is not feed.cache
        return not feed.chain.stopped

    def _run(self, feeds: Sequence[_Feed]) -> dict[_Chain, _Drawn | None]:
        """What each chain that draws has drawn; None where there is no token to propose."""
        if not feeds:
            return {}
        logits = self._runner.forward([feed.slice() for feed in feeds])
        drawing = [feed.chain for feed in feeds if feed.draws]
        draws = draw(logits, [chain.session.block() for chain in drawing])
        return {
            chain: self._proposal(token_id, logits[index], chain.session.sampling)
            for index, (chain, drawn) in enumerate(zip(drawing, draws, strict=True))
            for token_id in drawn.token_ids
        }

    def _proposal(
        self, token_id: int | None, logits: torch.Tensor, sampling: SamplingParams
    ) -> _Drawn | None:
        if token_id is None or token_id >= self._vocab_size:
            return None
        return _Drawn(token_id, _probability(logits, sampling, token_id))


def _probability(logits: torch.Tensor, sampling: SamplingParams, token_id: int) -> float:
    """Of a token under the distribution it was drawn from, in (0, 1]; of a greedy one, under the
    distribution at temperature 1.

    logits  # [vocab]
    """
    target = target_logits(logits, sampling)
    log_probs = torch.log_softmax(target.logits, dim=-1)
    log_prob = float(log_probs[target.token_ids == token_id])
    return min(1.0, max(_LEAST_CONFIDENCE, math.exp(log_prob)))


def _common_prefix_len(tail: Sequence[_Drawn], token_ids: Sequence[int]) -> int:
    pairs = zip(tail, token_ids, strict=False)
    differing = (i for i, (drawn, token_id) in enumerate(pairs) if drawn.token_id != token_id)
    return next(differing, min(len(tail), len(token_ids)))


def _default_step_tokens(runner: ModelRunner) -> int:
    return _CPU_STEP_TOKENS if runner.device.type == "cpu" else _ACCELERATOR_STEP_TOKENS


def _tokenizer_size(tokenizer_json: str) -> int:
    """One more than the largest id that the tokenizer knows."""
    vocab: dict[str, int] = Tokenizer.from_str(tokenizer_json).get_vocab(with_added_tokens=True)
    return max(vocab.values(), default=-1) + 1
