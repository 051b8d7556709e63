"""One generation in the engine: its sequence, its drafts, and what shapes its distribution."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import torch

from cluster.config import SpeculationConfig, VerificationRule
from cluster.errors import InternalError, InvalidRequestError, PacelineError
from cluster.grammar import GrammarError
from cluster.types import GenerationRequest, ModelCard, TokenLogprobs
from engine.adjustments import Adjustments, adjustments_of
from engine.grammar import GrammarState
from engine.sequence import Sequence, SequenceState
from engine.target import Block, Drawn, token_logprobs
from verifier_service.acceptance import Verification, verify
from verifier_service.events import Submitted
from verifier_service.local_drafting import usable_kinds
from verifier_service.ratio_verification import verify_by_ratio
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
    placed_at: float | None = None
    """When it got its place in the engine, on the same clock."""
    grammar_error: str = ""
    """Why the grammar cannot go on."""

    @classmethod
    def of(
        cls,
        message: Submitted,
        card: ModelCard,
        config: SpeculationConfig,
        kinds: Collection[str] = (),
    ) -> Generation:
        """What a router submitted, before its first step. `kinds`: of drafter inside this
        verifier."""
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
        wish = request.num_speculative_tokens
        depth = min(wish or most, most)
        local_most = config.num_local_speculative_tokens if depth else 0
        speculation = Speculation(
            depth,
            request.path,
            local_depth=min(wish or local_most, local_most),
            local_kinds=usable_kinds(request, kinds),
            remote=request.drafter not in kinds,
            rule=_rule(request, config),
        )
        deadline = time.monotonic() + request.deadline_ms / 1e3 if request.deadline_ms else None
        return cls(
            Sequence(message.seq, request, stop_ids, card.max_model_len),
            speculation,
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
    def wants_drafts(self) -> bool:
        """Something may draft for it, and more than one token may come."""
        return self.speculation.drafts_now and self.sequence.max_draft_len > 0

    @property
    def is_due(self) -> bool:
        """A draft is on its way that this step could use."""
        if not self.is_decoding or not self.speculation.due:
            return False
        return not self.speculation.holds_chain(self.sequence.max_draft_len)

    def drafts(self, max_len: int) -> tuple[int, ...]:
        """The chosen drafts that one rule verifies; none behind one that the grammar forbids, which
        a ratio test has to refuse itself."""
        chosen = self.speculation.chosen[:max_len]
        has_laws = [self.speculation.tells_laws and node.law is not None for node in chosen]
        num_alike = has_laws.index(not has_laws[0]) if len(set(has_laws)) > 1 else len(chosen)
        draft_ids = tuple(node.token_id for node in chosen[:num_alike])
        if self.grammar is None or not draft_ids:
            return draft_ids
        return draft_ids[: self.grammar.valid_prefix_len(draft_ids) + has_laws[0]]

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

    def verify(self, block: Block, logits: torch.Tensor, drawn: Drawn) -> Verification:
        """What is final of a block of drafts.

        logits  # [num_rows, vocab], as the draw left them

        Where a drafter's laws are missing or cannot be, and where the target has no distribution,
        its drafts are verified by coupling, which is exact beside a ratio test too: the draw that
        decides then has noise that took no part in drawing the draft.
        """
        laws = self.speculation.laws(len(block.draft_ids))
        if not laws or None in drawn.token_ids:
            return verify(block.draft_ids[: len(drawn.token_ids) - 1], drawn.token_ids)
        assert self.speculation.trie is not None
        by_block = self.speculation.rule == "block"
        prefix_hash = self.speculation.trie.prefix_hash
        return verify_by_ratio(block, laws, logits, drawn, prefix_hash, by_block=by_block)

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


def _rule(request: GenerationRequest, config: SpeculationConfig) -> VerificationRule:
    """A greedy draft is a point mass, and so is what a client predicts; of such coupling accepts as
    much as any rule can."""
    if request.sampling.greedy or request.prediction_ids:
        return "coupled"
    return config.verification
