"""One generation as the engine holds it: its tokens, its KV, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum, auto

from cluster.types import FinishReason, GenerationRequest
from engine.kv_cache import SequenceCache


class SequenceState(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    """It holds no KV: new, or preempted."""
    RUNNING = auto()
    """It holds KV and takes part in steps."""
    FINISHED = auto()
    """It holds nothing; nothing more will be said of it."""


_TRANSITIONS = {
    SequenceState.WAITING: {SequenceState.RUNNING, SequenceState.FINISHED},
    SequenceState.RUNNING: {SequenceState.WAITING, SequenceState.FINISHED},
    SequenceState.FINISHED: frozenset[SequenceState](),
}


@dataclass(frozen=True, slots=True)
class Emission:
    """What a sequence takes of a step's new tokens."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Sequence:
    """Invariants: `token_ids` only grows, and only by tokens that are final for the client; the KV
    of `cache.num_committed` of them is computed, and of the last one it never is while more are to
    come, since its logits are still to be taken."""

    seq: int
    request: GenerationRequest
    stop_ids: frozenset[int]
    """Ids that end the generation: the request's, and the model's unless they are ignored."""
    max_len: int
    """Most tokens of prompt and completion together."""
    token_ids: list[int] = field(init=False)
    state: SequenceState = SequenceState.WAITING
    cache: SequenceCache | None = None
    num_scored_tokens: int = field(init=False)
    """Prompt tokens whose log probabilities are told or not wanted; the first has none."""
    num_cached_prompt_tokens: int | None = None
    """Prompt tokens that were not computed when it first ran, because their KV was there."""

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_ids, *self.request.resumed_ids]
        room = len(self.request.prompt_ids) + self.request.max_tokens
        self.max_len = min(self.max_len, room)
        wanted = self.request.num_prompt_logprobs is not None
        self.num_scored_tokens = 1 if wanted else self.num_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the cache for good."""
        return 0 if self.cache is None else self.cache.num_committed

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens still to be fed; 1 while decoding, more while prefilling."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_full(self) -> bool:
        """It takes no more tokens."""
        return len(self.token_ids) >= self.max_len

    @property
    def scores(self) -> bool:
        """Log probabilities of its prompt are still to be told."""
        return self.num_scored_tokens < self.num_prompt_tokens

    @property
    def findable_ids(self) -> list[int]:
        """Tokens whose KV may be taken from another sequence. While the prompt is scored none
        behind those that are told: another's KV brings no logits."""
        return self.token_ids[: self.num_scored_tokens] if self.scores else self.token_ids

    @property
    def max_draft_len(self) -> int:
        """Drafts beyond this could not be delivered: one token comes without any draft."""
        return max(0, self.max_len - len(self.token_ids) - 1)

    def begin(self, cache: SequenceCache) -> None:
        """Run, from what is committed in `cache` on."""
        self.move_to(SequenceState.RUNNING)
        self.cache = cache
        if self.num_cached_prompt_tokens is None:
            self.num_cached_prompt_tokens = min(cache.num_committed, self.num_prompt_tokens)

    def move_to(self, state: SequenceState) -> None:
        """Change the state; an illegal move is a bug and raises."""
        assert state in _TRANSITIONS[self.state], f"sequence {self.seq}: {self.state} to {state}"
        self.state = state

    def emit(self, new_ids: Tokens[int]) -> Emission:
        """Append what may be delivered of `new_ids`, token by token: a stop id is delivered and
        ends the generation, then the length cap does. The plain and the speculative path both end
        here, so that a stop inside a block is a stop."""
        emitted: list[int] = []
        reason: FinishReason | None = None
        for token_id in new_ids:
            emitted.append(token_id)
            self.token_ids.append(token_id)
            if token_id in self.stop_ids:
                reason = FinishReason.STOP
            elif self.is_full:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        return Emission(tuple(emitted), reason)
