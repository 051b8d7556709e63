"""Constrained decoding: which tokens a grammar allows after the tokens so far.

The grammar narrows the target distribution. What it allows at a position depends on the spec and
the committed tokens alone: a draft changes nothing, and a state can be made anew from its tokens.
llguidance does the parsing; computing a mask leaves the GIL to others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from cluster.grammar import GrammarError, GrammarSpec
from cluster.grammar_check import GrammarChecker
from cluster.grammar_matcher import compile_matcher, raise_if_broken
from engine.forced_text import forced_token
from engine.grammar_vocabulary import Bitmask, GrammarVocabulary


def apply_mask(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Take away in place what is not allowed.

    logits   # [n, vocab] float32
    bitmask  # [n, num_bytes] uint8, as GrammarState.masks gives it
    """
    places = bitmask.to(logits.device, torch.int32)
    bias = _biases(logits.device).index_select(0, places.flatten()).view(len(logits), -1)
    logits.add_(bias[:, : logits.shape[1]])


@functools.cache
def _biases(device: torch.device) -> torch.Tensor:
    """[256, 8]: 0 where a byte's bit is set, else -inf. Adding what is looked up is several times
    as fast on a CPU as unpacking bits."""
    is_set = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(is_set, np.float32(0), np.float32(-np.inf))).to(device)


class GrammarCompiler:
    """Makes the states of generations; one for each model. May be used from many threads.

    A grammar is compiled in this process only after another one has survived it.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocabulary = GrammarVocabulary(tokenizer_json, vocab_size, eos_token_ids)
        self._checker = GrammarChecker(tokenizer_json, vocab_size)

    def compile(self, spec: GrammarSpec) -> GrammarState:
        """The state before the first token. Takes milliseconds mostly and at worst a second or two,
        so not in the engine's thread. Raises GrammarError, or OverloadedError."""
        self._checker.check(spec)
        return GrammarState(self._vocabulary, spec)

    def close(self) -> None:
        """End the process that checks grammars."""
        self._checker.close()


class GrammarState:
    """Where one generation stands in its grammar. For one thread.

    Each has an automaton of its own. Copies of one would share what it learns and fail together, so
    that one request could end another.
    """

    def __init__(self, vocabulary: GrammarVocabulary, spec: GrammarSpec) -> None:
        self._vocabulary = vocabulary
        self._spec = spec
        self._matcher = compile_matcher(vocabulary.tokenizer, spec)
        """Stands behind `_committed`. It is never fed an end-of-sequence token, since it would not
        take one back exactly."""
        self._committed: list[int] = []
        self._ended = False

    @property
    def finished(self) -> bool:
        """An end-of-sequence token was committed."""
        return self._ended

    @property
    def accepting(self) -> bool:
        """The text so far is complete, though it may go on."""
        return self._ended or self._matcher.is_accepting()

    def commit(self, token_ids: Sequence[int]) -> None:
        """Make tokens final. Raises GrammarError if the grammar does not allow them; then the state
        is of no more use."""
        for token_id in token_ids:
            if token_id in self._vocabulary.eos_ids:
                if not self._may_end_with(token_id):
                    raise GrammarError("the text ends where the grammar does not")
                self._ended = True
            elif self._ended:
                raise GrammarError("the text goes on after its end")
            else:
                self._commit_text(token_id)

    def valid_prefix_len(self, draft_ids: Sequence[int]) -> int:
        """How many drafts are worth a place in the step: a cheap estimate, seldom too low, of how
        many `masks` will allow."""
        if self._ended:
            return 0
        text_ids = self._until_end(draft_ids)
        num_valid = self._matcher.validate_tokens(text_ids)
        if self._matcher.is_error():
            self._rebuild()
            return 0
        ends = num_valid == len(text_ids) < len(draft_ids)
        return num_valid + ends

    def masks(self, draft_ids: Sequence[int]) -> torch.Tensor:
        """What is allowed behind the committed tokens, then behind each draft too.

        Stops at a draft that the grammar forbids, and before a position where it cannot go on, as
        if the draft had ended there: verify no more than `len(masks) - 1` drafts.

        returns  # [num_drafts + 1, num_bytes] uint8; bit i % 8 of byte i // 8 is token i

        Raises GrammarError if the grammar cannot go on behind the committed tokens.
        """
        rows = [self._first_mask()]
        num_consumed = 0
        for token_id in () if self._ended else draft_ids:
            if not rows[-1][token_id >> 3] >> (token_id & 7) & 1:
                break
            if token_id in self._vocabulary.eos_ids:
                rows.append(self._vocabulary.eos)
                break
            num_consumed += 1
            try:
                self._matcher.consume_token(token_id)
                rows.append(self._mask())
            except GrammarError:
                break
        if not self._matcher.rollback(num_consumed):
            self._rebuild()
        return torch.from_numpy(np.stack(rows))

    def nothing(self) -> torch.Tensor:
        """A mask that allows no token, as `masks` gives it."""
        return torch.zeros(1, len(self._vocabulary.tokens), dtype=torch.uint8)

    def _first_mask(self) -> Bitmask:
        try:
            return self._mask()
        except GrammarError:
            # What was parsed before, refused drafts among it, counts towards the automaton's
            # limits. A request must not fail for that.
            self._rebuild()
            return self._mask()

    def _mask(self) -> Bitmask:
        """What is allowed behind all that was consumed."""
        if self._ended:
            return self._vocabulary.eos
        raise_if_broken(self._matcher)
        num_bytes = len(self._vocabulary.tokens)  # The automaton gives up to four more.
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8, count=num_bytes)
        raise_if_broken(self._matcher)
        mask = mask & self._vocabulary.tokens | self._ends(mask)
        if not mask.any():
            raise GrammarError("the grammar allows nothing here")
        token_id = forced_token(self._matcher, self._vocabulary, mask)
        return mask if token_id is None else self._vocabulary.bits([token_id])

    def _ends(self, mask: Bitmask) -> Bitmask:
        """The end-of-sequence tokens that are allowed here, given what the automaton allows: all
        where the text is complete, else those that the grammar names as its last token."""
        if self._matcher.is_accepting():
            return self._vocabulary.eos
        if not (mask & self._vocabulary.eos).any():
            return np.zeros_like(mask)
        return self._vocabulary.bits(filter(self._may_end_with, self._vocabulary.eos_ids))

    def _may_end_with(self, eos_id: int) -> bool:
        if self.accepting:
            return True
        behind = self._matcher.deep_copy()
        return behind.consume_token(eos_id) and behind.is_accepting()

    def _until_end(self, token_ids: Sequence[int]) -> list[int]:
        eos_ids = self._vocabulary.eos_ids
        ends = (index for index, token_id in enumerate(token_ids) if token_id in eos_ids)
        return list(token_ids[: next(ends, len(token_ids))])

    def _commit_text(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            self._rebuild()  # as in _first_mask
            if not self._matcher.consume_token(token_id):
                raise GrammarError("the grammar does not allow this token")
        self._committed.append(token_id)

    def _rebuild(self) -> None:
        """A new automaton in place of one that has failed, for that is final. If this one fails on
        its way too, the next mask tells."""
        self._matcher = compile_matcher(self._vocabulary.tokenizer, self._spec)
        self._matcher.consume_tokens(self._committed)
