"""The model drafter: a causal language model drafts for many sessions, batched.

It decodes as the verifier does: its own distribution, the session's sampling parameters, the same
noise at the same positions; so it tends to draw the token that the verifier will draw. Where it is
wrong, the verifier tends to draw the runner-up: the token that it would draw itself if there were
not the first. So a likely correction is a branch of the chain that begins with a runner-up.

A session is its committed tokens. The rest is work that may be dropped at any time and done again:
KV, and what was drafted and is neither confirmed nor contradicted yet.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from tokenizers import Tokenizer

from cluster.config import KVCacheConfig, ModelConfig
from cluster.draft_law import LAW_TOTAL, DraftLaw
from cluster.protocol.prefix_hash import EMPTY_PREFIX_HASH, prefix_hash
from cluster.types import DraftNode, SamplingParams
from engine.adjustments import Adjustments, adjustments_of
from engine.decoder import SequenceSlice
from engine.drafting.interface import DraftRequest, DraftSession
from engine.drafting.law import draft_key, draw_draft, law_of
from engine.kv_cache import CachedPrefix, SequenceCache
from engine.loader import load_model
from engine.model_runner import ModelRunner
from engine.processors import token_probs
from engine.target import Block, draw

_CPU_STEP_TOKENS = 32
"""A CPU takes a prompt at most a quarter faster in larger pieces, and drafting waits for each."""
_ACCELERATOR_STEP_TOKENS = 512
_READ_S = 0.010
_MAX_EXTRA_FORWARDS = 32
"""Forwards of one call beyond those that the longest chain takes."""
_LEAST_CONFIDENCE = torch.finfo(torch.float32).tiny
_MAX_KEPT_ROWS = 128
"""Rows of logits that are kept for runners-up, those drawn last."""
_AGREEMENT_WEIGHT = 0.05
_LEAST_BRANCH_CHANCE = 0.02
"""A correction is not prepared where the chance that one is needed is below this."""


@dataclass(frozen=True, slots=True, eq=False)
class _Drawn:
    """A token that the draft model drew."""

    token_id: int
    confidence: float
    law: DraftLaw | None = None


@dataclass(slots=True, eq=False)
class _Path:
    """Tokens drafted behind the committed ones, and the KV of both."""

    tail: list[_Drawn] = field(default_factory=list)
    cache: SequenceCache | None = None
    fork: int = 0
    """Of a branch: how many of its first tokens are the chain's."""

    @property
    def num_computed(self) -> int:
        return 0 if self.cache is None else self.cache.num_slots

    def num_agreeing(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens it foresaw before the first other one."""
        pairs = zip(self.tail, token_ids, strict=False)
        differing = (i for i, (drawn, token_id) in enumerate(pairs) if drawn.token_id != token_id)
        return next(differing, min(len(self.tail), len(token_ids)))


@dataclass(slots=True, eq=False)
class _Session:
    """Invariant: a path's KV is computed for the first `num_computed` of the committed tokens and
    its tail, and never for the last of all, since its logits are still to be taken. The slots of
    committed tokens are committed, those of the tail pending."""

    request_key: int
    sampling: SamplingParams
    adjustments: Adjustments | None
    token_ids: list[int] = field(default_factory=list)
    """Committed."""
    chain: _Path = field(default_factory=_Path)
    """What the model draws after them."""
    branches: list[_Path] = field(default_factory=list)
    """What it would draw if one token of the chain were the runner-up. Each shares with the chain
    the full blocks of committed tokens."""
    readable: bool = True
    """Every committed token is in the draft model's vocabulary."""
    law_key: int | None = None
    """Of the noise that draws tokens with their laws; None draws as the verifier does."""
    prefix_hash: int = EMPTY_PREFIX_HASH
    """Of the committed tokens; only where `law_key` is."""
    agreement: float = 0.7
    """Share of the drafted tokens that were committed, of late."""

    @property
    def paths(self) -> Iterator[_Path]:
        yield self.chain
        yield from self.branches

    def judge(self, token_ids: Sequence[int]) -> None:
        """Compare the chain with what was committed, up to the first difference."""
        for drawn, token_id in zip(self.chain.tail, token_ids, strict=False):
            agrees = drawn.token_id == token_id
            self.agreement += _AGREEMENT_WEIGHT * (agrees - self.agreement)
            if not agrees:
                break

    def num_uncomputed(self, path: _Path) -> int:
        return len(self.token_ids) + len(path.tail) - path.num_computed

    def uncomputed_ids(self, path: _Path, limit: int) -> list[int]:
        """The first `limit` tokens without KV."""
        start, num_committed = path.num_computed, len(self.token_ids)
        token_ids = self.token_ids[start : start + limit]
        tail_start = max(0, start - num_committed)
        tail_end = tail_start + limit - len(token_ids)
        return token_ids + [drawn.token_id for drawn in path.tail[tail_start:tail_end]]

    def block(self, tail: Sequence[_Drawn], adjustments: Adjustments | None) -> Block:
        """How the token after the committed ones and these is drawn."""
        tail_ids = [drawn.token_id for drawn in tail]
        return Block(self.sampling, self.request_key, len(self.token_ids), tail_ids, 1, adjustments)

    def nodes(self, num_tokens: int) -> tuple[DraftNode, ...]:
        """The chain up to `num_tokens`, and the branches that hang on that."""
        nodes: list[DraftNode] = []
        _append(nodes, self.chain.tail[:num_tokens], -1)
        num_chain = len(nodes)
        for branch in self.branches:
            if branch.fork < num_chain:
                _append(nodes, branch.tail[branch.fork :], branch.fork - 1)
        return tuple(nodes)

    def places_of_correction(self, least_chance: float) -> list[int]:
        """Where the chain may well be wrong first and has no branch, the likeliest first. A token
        is as sure as those before have proved to be, and the surer the higher its confidence."""
        least_chance = max(least_chance, _LEAST_BRANCH_CHANCE)
        survival, chances = 1.0, {}
        for place, drawn in enumerate(self.chain.tail):
            doubt = (1.0 - self.agreement) * (1.0 - drawn.confidence)
            chances[place] = survival * doubt
            survival *= 1.0 - doubt
        taken = {branch.fork for branch in self.branches}
        likely = [p for p, c in chances.items() if c > least_chance and p not in taken]
        return sorted(likely, key=chances.__getitem__, reverse=True)


def _append(nodes: list[DraftNode], tail: Sequence[_Drawn], parent: int) -> None:
    for drawn in tail:
        nodes.append(DraftNode(drawn.token_id, parent, drawn.confidence, drawn.law))
        parent = len(nodes) - 1


@dataclass(slots=True, eq=False)
class _Growth:
    """A path that a draft call wants longer."""

    session: _Session
    path: _Path
    num_tokens: int
    """How long its tail shall be."""
    least_survival: float = 0.0
    """It ends at a token that is less likely than this."""
    stopped: bool = False
    """It cannot grow in this call."""

    @property
    def is_branch(self) -> bool:
        return self.path is not self.session.chain

    @property
    def is_gone(self) -> bool:
        """Its branch had to make room."""
        return self.is_branch and self.path not in self.session.branches

    @property
    def num_uncomputed(self) -> int:
        return self.session.num_uncomputed(self.path)

    @property
    def num_missing(self) -> int:
        return self.num_tokens - len(self.path.tail)

    @property
    def finished(self) -> bool:
        if self.stopped or self.num_missing <= 0:
            return True
        return math.prod(drawn.confidence for drawn in self.path.tail) < self.least_survival


@dataclass(frozen=True, slots=True)
class _Feed:
    """One path's part of a forward. The slots of its tokens are reserved."""

    growth: _Growth
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
        read_s: float = _READ_S,
    ) -> None:
        """`vocab_size`: ids from here on mean nothing to the tokenizer, though a padded model has
        rows for them; they are never proposed. `max_step_tokens`: tokens in one forward, of which
        prompts take what drafting leaves; by default what suits the device. `read_s`: how long a
        call goes on that only reads prompts; a forward at least."""
        self._runner = runner
        self._kv = runner.kv
        self._vocab_size = min(vocab_size or runner.vocab_size, runner.vocab_size)
        self._max_step_tokens = max_step_tokens or _default_step_tokens(runner)
        self._read_s = read_s
        self._sessions: dict[int, _Session] = {}
        """By key; those drafted for last are last, and may take the KV of those before them."""
        self._rows: OrderedDict[_Drawn, torch.Tensor] = OrderedDict()
        """Logits that tokens of chains were drawn from, adjusted, [vocab] each."""

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
        if session.wants_laws:
            state.law_key = draft_key(session.request_key)
        if adjustments is not None:
            adjustments.commit(session.token_ids[session.num_prompt_tokens :])
        self._sessions[session.session_key] = state
        self._append(state, session.token_ids)

    def extend(self, session_key: int, token_ids: Sequence[int]) -> None:
        """What goes on from these tokens is kept: the chain with its later branches, or else the
        branch that foresaw the most."""
        session = self._sessions[session_key]
        session.judge(token_ids)
        best = max(session.paths, key=lambda path: path.num_agreeing(token_ids))  # the first of all
        num_agreeing = best.num_agreeing(token_ids)
        foreseen = num_agreeing == len(token_ids)
        goes_on = foreseen and best is session.chain
        kept = [b for b in session.branches if goes_on and b.fork >= num_agreeing]
        for path in list(session.paths):
            if path is not best and path not in kept:
                self._close(path)
        session.chain, session.branches = best, kept
        for path in session.paths:
            path.fork = max(0, path.fork - num_agreeing)
            del path.tail[:num_agreeing]
        if not foreseen:
            self._keep_computed(best, len(session.token_ids) + num_agreeing)
            best.tail.clear()
        if session.adjustments is not None:
            session.adjustments.commit(token_ids)
        self._append(session, token_ids)

    def draft(self, requests: Sequence[DraftRequest]) -> list[tuple[DraftNode, ...] | None]:
        """The call ends when those chains are done that have least to catch up on. No prompt of
        another holds them up, nor does a branch: they go on in the next call for their session. A
        call with nothing else takes as many forwards as branches are to grow, and reads prompts for
        some milliseconds."""
        chains = [self._chain(request) for request in requests]
        self._mark_used(requests)
        self._begin_branches(requests)
        branches = [branch for branch in self._branches(requests) if not branch.finished]
        growing = [chain for chain in chains if not chain.finished]
        self._grow([*growing, *branches], self._ready(growing))
        return [
            chain.session.nodes(chain.num_tokens) if chain.finished else None for chain in chains
        ]

    def end(self, session_key: int) -> None:
        self._release(self._sessions.pop(session_key))

    # --- sessions ----------------------------------------------------------------------------

    def _append(self, session: _Session, token_ids: Sequence[int]) -> None:
        """These are committed; what of the KV is theirs is final."""
        session.token_ids += token_ids
        if session.law_key is not None:
            session.prefix_hash = prefix_hash(token_ids, session.prefix_hash)
        session.readable &= all(token_id < self._vocab_size for token_id in token_ids)
        self._settle(session)

    def _chain(self, request: DraftRequest) -> _Growth:
        session = self._sessions[request.session_key]
        room = self._room(session)
        if session.readable and room > 0:
            most = min(request.num_tokens, room)
            return _Growth(session, session.chain, most, _least_survival(session, request))
        self._release(session)  # It only grows, so it will never be drafted for again.
        return _Growth(session, session.chain, 0)

    def _room(self, session: _Session) -> int:
        """Longest tail."""
        return self.max_context_len - len(session.token_ids)

    def _mark_used(self, requests: Sequence[DraftRequest]) -> None:
        """Within a call the first request goes before the others."""
        for request in reversed(requests):
            self._sessions[request.session_key] = self._sessions.pop(request.session_key)

    # --- branches ----------------------------------------------------------------------------

    def _branches(self, requests: Sequence[DraftRequest]) -> Iterator[_Growth]:
        """Those that are to grow."""
        for request in requests:
            session = self._sessions[request.session_key]
            for branch in session.branches if request.num_branches else ():
                most = min(branch.fork + request.branch_len, self._room(session))
                yield _Growth(session, branch, most, _least_survival(session, request))

    def _begin_branches(self, requests: Sequence[DraftRequest]) -> None:
        """A branch with its first token at each of the likeliest places, of all sessions together.
        Without KV there is none: the chain goes first."""
        places = [
            (session, place)
            for request in requests
            if (session := self._sessions[request.session_key]).chain.cache is not None
            for place in self._places(session, request)
        ]
        if not places:
            return
        rows = torch.stack([self._rows[s.chain.tail[place]] for s, place in places])
        for row, (session, place) in zip(rows, places, strict=True):
            row[session.chain.tail[place].token_id] = -torch.inf
        # The rows were adjusted when the chain was drawn.
        blocks = [s.block(s.chain.tail[:place], None) for s, place in places]
        for runner_up, (session, place) in zip(self._draw(rows, blocks), places, strict=True):
            if runner_up is not None:
                self._begin_branch(session, place, runner_up)

    def _places(self, session: _Session, request: DraftRequest) -> list[int]:
        """Where the session shall have a branch and has none. A chain of laws has none: which of
        two drafts is verified would hang on what was drawn."""
        if session.law_key is not None:
            return []
        places = session.places_of_correction(request.least_survival)
        places = places[: max(0, request.num_branches - len(session.branches))]
        return [place for place in places if session.chain.tail[place] in self._rows]

    def _begin_branch(self, session: _Session, place: int, runner_up: _Drawn) -> None:
        assert session.chain.cache is not None
        wrong = session.chain.tail[place]
        confidence = runner_up.confidence * (1.0 - wrong.confidence)
        tail = [*session.chain.tail[:place], _Drawn(runner_up.token_id, confidence)]
        cache = self._fork(session.chain.cache, len(session.token_ids) + place)
        session.branches.append(_Path(tail, cache, place))
        self._settle(session)

    def _fork(self, cache: SequenceCache, num_tokens: int) -> SequenceCache:
        """A cache that begins with `num_tokens` of another, as far as these are computed: it shares
        the full blocks of committed tokens and has a copy of the rest, if there is room."""
        num_full = cache.num_committed // self._kv.block_size
        shared = CachedPrefix(cache.prefix_name, tuple(cache.block_table[:num_full]))
        fork = self._kv.open(shared)
        num_computed = min(num_tokens, cache.num_slots)
        if self._kv.reserve(fork, num_computed - fork.num_slots):
            pairs = zip(cache.block_table, fork.block_table, strict=False)
            for source, target in islice(pairs, num_full, None):
                self._runner.copy_block(source, target)
        return fork

    # --- KV ----------------------------------------------------------------------------------

    def _settle(self, session: _Session) -> None:
        """Make final what is computed of the committed tokens."""
        for path in session.paths:
            if (cache := path.cache) is not None:
                num_final = min(cache.num_slots, len(session.token_ids))
                self._kv.commit(cache, session.token_ids[cache.num_committed : num_final])

    def _keep_computed(self, path: _Path, num_tokens: int) -> None:
        """Take back the KV of all tokens but the first `num_tokens`."""
        if (cache := path.cache) is not None:
            self._kv.rollback(cache, max(0, cache.num_slots - num_tokens))

    def _reserve(self, growth: _Growth, num_tokens: int) -> SequenceCache | None:
        """Slots for a path's next tokens; None if there is no room. For a chain, branches make
        room, then sessions that were used before it."""
        path = growth.path
        cache = path.cache = path.cache or self._kv.open()
        while not self._kv.reserve(cache, num_tokens):
            if growth.is_branch or not self._make_room(growth.session):
                return None
        return cache

    def _make_room(self, session: _Session) -> bool:
        """Take KV from whom it is missed least; False if only this session's chain has any."""
        victim = next((s for s in self._sessions.values() if s.branches), None)
        if victim is not None:
            self._drop_branches(victim)
            return True
        victim = next(
            (s for s in self._sessions.values() if s is session or s.chain.cache), session
        )
        if victim is session:
            return False
        self._release(victim)
        return True

    def _release(self, session: _Session) -> None:
        self._drop_branches(session)
        self._close(session.chain)

    def _drop_branches(self, session: _Session) -> None:
        for branch in session.branches:
            self._close(branch)
        session.branches.clear()

    def _close(self, path: _Path) -> None:
        if path.cache is not None:
            self._kv.close(path.cache)
            path.cache = None

    # --- one forward -------------------------------------------------------------------------

    def _ready(self, chains: Sequence[_Growth]) -> list[_Growth]:
        """Those that are to be finished, the shortest way first: about two forwards take them to
        where they grow."""
        room = 2 * self._room_of(chains)
        ready: list[_Growth] = []
        for chain in sorted(chains, key=lambda chain: chain.num_uncomputed):
            room -= chain.num_uncomputed
            if room >= 0 and chain.num_uncomputed <= self._max_step_tokens:
                ready.append(chain)
        return ready

    def _room_of(self, growths: Sequence[_Growth]) -> int:
        """Tokens of a forward."""
        return max(self._max_step_tokens, 2 * len(growths))

    def _grow(self, growing: Sequence[_Growth], ready: Sequence[_Growth]) -> None:
        """Run forwards until the chains that are ready to grow are finished."""
        if ready:
            most = max(chain.num_tokens for chain in ready) + _MAX_EXTRA_FORWARDS
        else:
            most = max((g.num_missing for g in growing if g.is_branch), default=1)
        read_until = time.monotonic() + (0.0 if ready else self._read_s)
        num_forwards = 0
        while num_forwards < most or time.monotonic() < read_until:
            unfinished = [growth for growth in growing if not growth.finished]
            if not unfinished or (ready and all(chain.finished for chain in ready)):
                break
            self._step(unfinished)
            num_forwards += 1

    def _step(self, growths: Sequence[_Growth]) -> None:
        """Feed some of what is not computed yet, and draw where that reaches the end."""
        feeds = self._plan(growths)
        try:
            drawn = self._run(feeds)
        except BaseException:
            for feed in feeds:
                self._kv.rollback(feed.cache, len(feed.token_ids))
            raise
        for growth, token in drawn.items():
            if token is not None:
                growth.path.tail.append(token)
            else:
                growth.stopped = True
                self._keep_computed(growth.path, growth.path.num_computed - 1)
        for feed in feeds:
            self._settle(feed.growth.session)

    def _plan(self, growths: Sequence[_Growth]) -> list[_Feed]:
        """Fill a forward: who has least to catch up on goes first, so drafting before prompts."""
        room = self._room_of(growths)
        feeds: list[_Feed] = []
        for growth in sorted(growths, key=lambda growth: growth.num_uncomputed):
            token_ids = growth.session.uncomputed_ids(growth.path, room)
            draws = len(token_ids) == growth.num_uncomputed
            if not token_ids:
                break
            start = growth.path.num_computed
            if growth.is_gone or (cache := self._reserve(growth, len(token_ids))) is None:
                growth.stopped = True
                continue
            feeds.append(_Feed(growth, cache, start, token_ids, draws))
            room -= len(token_ids)
        return [feed for feed in feeds if self._still_holds(feed)]

    def _still_holds(self, feed: _Feed) -> bool:
        """Whether a path that was planned has not lost its KV to one that goes before it."""
        feed.growth.stopped = feed.growth.path.cache is not feed.cache
        return not feed.growth.stopped

    def _run(self, feeds: Sequence[_Feed]) -> dict[_Growth, _Drawn | None]:
        """What each path that draws has drawn; None where there is no token to propose."""
        if not feeds:
            return {}
        logits = self._runner.forward([feed.slice() for feed in feeds])
        drawing = [feed.growth for feed in feeds if feed.draws]
        blocks = [g.session.block(g.path.tail, g.session.adjustments) for g in drawing]
        proposals: dict[_Growth, _Drawn | None] = {}
        for growth, row, drawn in zip(drawing, logits, self._draw(logits, blocks), strict=True):
            if growth.session.law_key is not None:
                proposals[growth] = self._draw_by_law(growth, row)
                continue
            proposals[growth] = drawn
            if drawn is not None and not growth.is_branch:
                self._keep_row(drawn, row)
        return proposals

    def _draw(self, logits: torch.Tensor, blocks: Sequence[Block]) -> list[_Drawn | None]:
        """What blocks of one row draw; None where there is no token to propose.

        logits  # [number of blocks, vocab]; afterwards adjusted
        """
        tokens: list[_Drawn | None] = [None] * len(blocks)
        token_ids = [drawn.token_ids[0] for drawn in draw(logits, blocks)]
        usable = {i: t for i, t in enumerate(token_ids) if t is not None and t < self._vocab_size}
        if usable:
            places, usable_ids = list(usable), list(usable.values())
            params = [blocks[place].sampling for place in places]
            probs = token_probs(logits[places], params, usable_ids)
            for place, token_id, prob in zip(places, usable_ids, probs, strict=True):
                tokens[place] = _Drawn(token_id, max(_LEAST_CONFIDENCE, prob))
        return tokens

    def _draw_by_law(self, growth: _Growth, row: torch.Tensor) -> _Drawn | None:
        """The confidence is of the law alone: a word on what was drawn would tell of it before it
        is judged."""
        session = growth.session
        law = law_of(row[: self._vocab_size], session.sampling)
        if law is None or session.law_key is None:
            return None
        tail_ids = (drawn.token_id for drawn in growth.path.tail)
        behind = prefix_hash(tail_ids, session.prefix_hash)
        token_id = draw_draft(law, session.law_key, behind)
        return _Drawn(token_id, max(law.weights) / LAW_TOTAL, law)

    def _keep_row(self, drawn: _Drawn, row: torch.Tensor) -> None:
        self._rows[drawn] = row.clone()
        if len(self._rows) > _MAX_KEPT_ROWS:
            self._rows.popitem(last=False)


def _least_survival(session: _Session, request: DraftRequest) -> float:
    """A chain of laws ends nowhere before its time: how far it goes must not hang on what was
    drawn."""
    return request.least_survival if session.law_key is None else 0.0


def _default_step_tokens(runner: ModelRunner) -> int:
    return _CPU_STEP_TOKENS if runner.device.type == "cpu" else _ACCELERATOR_STEP_TOKENS


def _tokenizer_size(tokenizer_json: str) -> int:
    """One more than the largest id that the tokenizer knows."""
    vocab: dict[str, int] = Tokenizer.from_str(tokenizer_json).get_vocab(with_added_tokens=True)
    return max(vocab.values(), default=-1) + 1
