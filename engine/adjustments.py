"""What a request changes about the model's logits before the distribution is formed.

In this order: repetition, frequency and presence penalty, logit bias, bad words, min_tokens. Then
come temperature and truncation (engine/processors.py). A block of drafts is adjusted position by
position: a row sees the committed tokens and the drafts before it, as if they had been generated
one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from cluster.types import SamplingParams


class Adjustments:
    """Of one sequence; a function of its parameters and its committed tokens."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        stop_ids: Iterable[int],
        vocab_size: int,
    ) -> None:
        """`stop_ids`: all ids that end this generation; held back until min_tokens.

        Ids from vocab_size on have no logit here, and nothing is done about them: a draft model may
        have fewer than its target.
        """
        self._params = params
        self._vocab_size = vocab_size
        self._stop_ids = torch.tensor(self._known(sorted(stop_ids)), dtype=torch.long)
        bias = [(i, value) for i, value in params.logit_bias if i < vocab_size]
        self._bias_ids = torch.tensor([i for i, _ in bias], dtype=torch.long)
        self._bias = torch.tensor([value for _, value in bias])
        self._bad_words = [word for word in params.bad_words if self._known(word[-1:])]
        self._longest = max((len(word) for word in self._bad_words), default=0)
        self._in_prompt = np.zeros(vocab_size, np.bool_)
        self._in_prompt[self._known(prompt_ids)] = True
        self._counts = np.zeros(vocab_size, np.int32)
        self._num_generated = 0
        self._tail = list(prompt_ids)[-self._longest :] if self._longest else []

    def commit(self, token_ids: Sequence[int]) -> None:
        """These were generated."""
        np.add.at(self._counts, self._known(token_ids), 1)
        self._num_generated += len(token_ids)
        if self._longest:
            self._tail = [*self._tail, *token_ids][-self._longest :]

    def apply(self, logits: torch.Tensor, draft_ids: Sequence[int]) -> None:
        """Adjust rows of one block, in place.

        logits  # [n, vocab] float32; the last row is drawn after all drafts, the one before it
                # after all but one, and so on
        """
        num_before = len(draft_ids) + 1 - len(logits)
        assert num_before >= 0
        if self._params.penalizes:
            self._penalize(logits, draft_ids)
        if len(self._bias_ids):
            logits[:, self._bias_ids.to(logits.device)] += self._bias.to(logits.device)
        if self._bad_words:
            self._ban_bad_words(logits, draft_ids)
        num_early = self._params.min_tokens - self._num_generated - num_before
        if num_early > 0:
            logits[:num_early, self._stop_ids.to(logits.device)] = -torch.inf

    def _known(self, token_ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id < self._vocab_size]

    def _penalize(self, logits: torch.Tensor, draft_ids: Sequence[int]) -> None:
        """As vLLM and the papers have it: the repetition penalty is of prompt and completion, the
        other two of the completion alone."""
        seen = self._in_prompt | (self._counts > 0)
        token_ids = np.union1d(np.flatnonzero(seen), draft_ids).astype(np.int64)
        drafted = np.zeros((len(logits), len(token_ids)), np.int32)
        first_row = len(logits) - len(draft_ids)  # that sees the first draft
        for row, place in enumerate(np.searchsorted(token_ids, draft_ids), start=first_row):
            drafted[max(row, 0) :, place] += 1
        counts = torch.from_numpy(self._counts[token_ids] + drafted).to(logits.device)
        repeated = (counts > 0) | torch.from_numpy(self._in_prompt[token_ids]).to(logits.device)
        columns = torch.from_numpy(token_ids).to(logits.device)
        values = logits[:, columns]
        penalty = self._params.repetition_penalty
        penalized = torch.where(values > 0, values / penalty, values * penalty)
        values = torch.where(repeated, penalized, values)
        values -= counts * self._params.frequency_penalty
        values -= (counts > 0) * self._params.presence_penalty
        logits[:, columns] = values

    def _ban_bad_words(self, logits: torch.Tensor, draft_ids: Sequence[int]) -> None:
        tokens = [*self._tail, *draft_ids]
        for row in range(len(logits)):
            before = tuple(tokens[: len(tokens) + 1 - len(logits) + row])
            for word in self._bad_words:
                start = len(before) - len(word) + 1
                if start >= 0 and before[start:] == word[:-1]:
                    logits[row, word[-1]] = -torch.inf


def adjustments_of(
    params: SamplingParams, prompt_ids: Sequence[int], stop_ids: Iterable[int], vocab_size: int
) -> Adjustments | None:
    """None for a request that leaves the logits as they are."""
    if not params.adjusts:
        return None
    return Adjustments(params, prompt_ids, stop_ids, vocab_size)
