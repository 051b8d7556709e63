"""Drafters that run inside the verifier: no pool, no round trip, no waiting.

They are asked before each step and write into the same tries as drafter replicas do. A sequence's
tokens are told to a drafter when it is asked, so that a sequence nobody drafts for costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from cluster.config import NgramConfig, SpeculationConfig
from cluster.types import DraftNode, GenerationRequest
from engine.drafting.interface import Drafter, DraftRequest, DraftSession
from engine.drafting.ngram import NgramDrafter
from engine.drafting.prediction import PredictionDrafter
from engine.drafting.suffix import SuffixDrafter
from engine.sequence import Sequence as EngineSequence

PREDICTION = "prediction"
"""The kind that drafts what the client predicted. Always there, and used on either path."""
_MAX_STEP_DRAFTS = 256
"""Drafts asked for in one step, over all sequences: more would not be verified, and cost time."""


def usable_kinds(request: GenerationRequest, kinds: Collection[str]) -> frozenset[str]:
    """Of the kinds of drafter inside this verifier, those that may draft for a request."""
    return frozenset(
        kind
        for kind in kinds
        if request.drafter in ("auto", kind) and (kind != PREDICTION or request.prediction_ids)
    )


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """Draft for a sequence, from its last committed token on."""

    seq: int
    kinds: Collection[str]
    num_tokens: int
    """Longest chain wanted of each kind."""


@dataclass(frozen=True, slots=True)
class LocalDraft:
    """What one drafter proposes for one sequence; never empty."""

    seq: int
    kind: str
    nodes: tuple[DraftNode, ...]


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What a client's prediction says to some tokens; nothing without one."""

    predicted: tuple[bool, ...] = ()
    """Per token: the prediction had it next."""
    num_resyncs: int = 0
    """How often, at these tokens, an answer that had left the prediction was found in it again."""


@dataclass(slots=True)
class _Followed:
    """A sequence, and how many of its tokens each drafter that has begun it was told."""

    sequence: EngineSequence
    told_len: dict[str, int] = field(default_factory=dict)


class LocalDrafting:
    """All drafters of one engine, used by its thread."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._prediction = PredictionDrafter()
        self._drafters: dict[str, Drafter] = {PREDICTION: self._prediction}
        if "ngram" in config.local_drafters:
            self._drafters["ngram"] = NgramDrafter(**NgramConfig().model_dump())
        if "suffix" in config.local_drafters:
            self._drafters["suffix"] = SuffixDrafter(**config.suffix.model_dump())
        self._followed: dict[int, _Followed] = {}

    @property
    def kinds(self) -> Collection[str]:
        """The drafters that are here."""
        return self._drafters.keys()

    @property
    def num_sequences(self) -> int:
        return len(self._followed)

    def begin(self, sequence: EngineSequence, *, predicts: bool) -> None:
        """Follow a sequence; `predicts`: what its client predicted may be drafted."""
        followed = self._followed[sequence.seq] = _Followed(sequence)
        if predicts:
            self._catch_up(followed, PREDICTION)

    def end(self, seq: int) -> None:
        """Forget a sequence; what it generated may be remembered for its tenant."""
        followed = self._followed.pop(seq)
        for kind in followed.told_len:
            self._catch_up(followed, kind)
            self._drafters[kind].end(seq)

    def committed(self, seq: int, token_ids: Sequence[int]) -> Foreseen:
        """A sequence has these tokens now: what its client's prediction says to them."""
        followed = self._followed.get(seq)
        if followed is None or PREDICTION not in followed.told_len:
            return Foreseen()
        followed.told_len[PREDICTION] += len(token_ids)
        num_before = self._prediction.num_resyncs(seq)
        predicted = self._prediction.follow(seq, token_ids)
        return Foreseen(predicted, self._prediction.num_resyncs(seq) - num_before)

    def draft(self, requests: Sequence[LocalRequest]) -> list[LocalDraft]:
        """What all drafters propose for these sequences."""
        most = _MAX_STEP_DRAFTS // max(1, len(requests))
        by_kind: defaultdict[str, list[DraftRequest]] = defaultdict(list)
        for request in requests:
            for kind in request.kinds:
                self._catch_up(self._followed[request.seq], kind)
                by_kind[kind].append(DraftRequest(request.seq, min(request.num_tokens, most)))
        return [
            LocalDraft(request.session_key, kind, nodes)
            for kind, asked in by_kind.items()
            for request, nodes in zip(asked, self._drafters[kind].draft(asked), strict=True)
            if nodes
        ]

    def _catch_up(self, followed: _Followed, kind: str) -> None:
        """Tell a drafter what it does not know of a sequence yet."""
        sequence, told_len = followed.sequence, followed.told_len.get(kind)
        drafter = self._drafters[kind]
        if told_len is None:
            drafter.begin(_session(sequence))
        elif told_len < len(sequence.token_ids):
            drafter.extend(sequence.seq, sequence.token_ids[told_len:])
        followed.told_len[kind] = len(sequence.token_ids)


def _session(sequence: EngineSequence) -> DraftSession:
    request = sequence.request
    return DraftSession(
        sequence.seq,
        tuple(sequence.token_ids),
        sequence.num_prompt_tokens,
        request.request_key,
        request.sampling,
        tenant=request.cache_salt,
        prediction_ids=request.prediction_ids,
    )
