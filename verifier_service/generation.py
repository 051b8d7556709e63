"""One generation in the engine: its sequence, its drafts, and what shapes its distribution."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from cluster.config import SpeculationConfig
from cluster.errors import InternalError, InvalidRequestError, PacelineError
from cluster.grammar import GrammarError
from cluster.types import ModelCard, TokenLogprobs
from engine.adjustments import Adjustments, adjustments_of
from engine.grammar import GrammarState
from engine.sequence import Sequence, SequenceState
from engine.target import Block, token_logprobs
from verifier_service.events import Submitted
from verifier_service.speculation import Speculation


@dataclass(slots=True)
class Generation:
    """Adjustments and grammar stand behind the sequence's tokens."""

    sequence: Sequence
    speculation: Speculation
    adjustments: Adjustments | None
    grammar: GrammarState | None
    deadline: float | None
    """On time.monotonic()."""
    grammar_error: str = ""
    """Why the grammar cannot go on."""

    @classmethod
    def of(cls, message: Submitted, card: ModelCard, config: SpeculationConfig) -> Generation:
        """What a router submitted, before its first step."""
        request = message.request
        stop_ids = request.stop_token_ids
        if not request.ignore_eos:
            stop_ids |= frozenset(card.eos_token_ids)
        adjustments = adjustments_of(
            request.sampling, request.prompt_ids, stop_ids, card.vocab_size
        )
        if adjustments is not None:
            adjustments.commit(request.resumed_ids)
        most = config.num_speculative_tokens
        depth = min(request.num_speculative_tokens or most, most)
        deadline = time.monotonic() + request.deadline_ms / 1e3 if request.deadline_ms else None
        return cls(
            Sequence(message.seq, request, stop_ids, card.max_model_len),
            Speculation(depth, request.path),
            adjustments,
            message.grammar,
            deadline,
        )

    @property
    def is_decoding(self) -> bool:
        """It draws tokens in each step; its prompt is computed."""
        sequence = self.sequence
        return sequence.state is SequenceState.RUNNING and sequence.num_uncomputed_tokens == 1

    @property
    def is_due(self) -> bool:
        """A draft is on its way that this step could use."""
        return self.is_decoding and self.sequence.max_draft_len > 0 and self.speculation.due

    def drafts(self, max_len: int) -> tuple[int, ...]:
        """The chosen drafts; none behind one that the grammar forbids."""
        draft_ids = tuple(node.token_id for node in self.speculation.chosen[:max_len])
        if self.grammar is None:
            return draft_ids
        return draft_ids[: self.grammar.valid_prefix_len(draft_ids)]

    def block(self, draft_ids: tuple[int, ...]) -> Block:
        """Its rows in a step that verifies these drafts."""
        request = self.sequence.request
        return Block(
            request.sampling,
            request.request_key,
            len(self.sequence.token_ids),
            draft_ids,
            len(draft_ids) + 1,
            self.adjustments,
            self._masks(draft_ids),
            keeps_logits=request.num_top_logprobs is not None,
        )

    def commit(self, token_ids: tuple[int, ...]) -> bool:
        """The sequence has these now. False if the grammar fails at them."""
        if self.adjustments is not None:
            self.adjustments.commit(token_ids)
        if self.grammar is not None:
            try:
                self.grammar.commit(token_ids)
            except GrammarError as error:
                self.grammar_error = str(error)
        return not self.grammar_error

    def failure(self) -> PacelineError:
        """Why there is no token to draw."""
        if self.grammar_error:
            return InvalidRequestError(self.grammar_error, param="grammar")
        return InternalError("the model's logits are not finite, or the request bans every token")

    def logprobs(
        self, token_ids: tuple[int, ...], logits: torch.Tensor | None
    ) -> tuple[TokenLogprobs, ...]:
        """Of these tokens, if the request wants them.

        logits  # [at least one row per token, vocab], the model's own
        """
        num_top = self.sequence.request.num_top_logprobs
        if logits is None or num_top is None:
            return ()
        return token_logprobs(logits, token_ids, num_top)

    def _masks(self, draft_ids: tuple[int, ...]) -> torch.Tensor | None:
        """What the grammar allows behind the committed tokens and behind each draft; nothing where
        it cannot go on."""
        if self.grammar is None:
            return None
        try:
            return self.grammar.masks(draft_ids)
        except GrammarError as error:
            self.grammar_error = str(error)
            return self.grammar.nothing()
