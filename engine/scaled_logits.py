"""The logits of many rows over their temperatures, computed only where somebody looks.

The vocabulary is cut into chunks. Their maxima, one pass over the logits, tell where not to look.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_CHUNK_LEN = 64
_FLOAT32 = torch.finfo(torch.float32)


def in_range(temperature: float) -> float:
    """The nearest temperature that float32 can divide by."""
    return min(max(temperature, _FLOAT32.tiny), _FLOAT32.max)


class ScaledLogits:
    """Of each row (logits - largest) / temperature, float32: 0 and below.

    Scaling rounds but keeps the order, so tokens may be ranked before it.
    """

    def __init__(self, logits: torch.Tensor, temperatures: Sequence[float]) -> None:
        """
        logits        # [n, vocab] float32; -inf is probability 0
        temperatures  # n, not negative; see in_range
        """
        self.vocab_size = logits.shape[-1]
        self._logits = logits
        self._chunks = _in_chunks(logits)
        self._maxima = self._chunks.amax(-1)  # [n, num_chunks]
        self.largest = self._maxima.amax(-1)
        """[n], not scaled; NaN where any logit of the row is."""
        self._temperatures = torch.tensor(
            [in_range(t) for t in temperatures], dtype=torch.float32, device=logits.device
        )

    def argmax(self) -> torch.Tensor:
        """The most likely token of every row; of a tie the lowest id, since torch's argmax takes
        the first.

        returns  # [n] int64
        """
        chunks = self._maxima.argmax(-1)
        rows = torch.arange(len(chunks), device=chunks.device)
        return self._chunks[rows, chunks].argmax(-1).add_(chunks, alpha=_CHUNK_LEN)

    def row(self, row: int) -> torch.Tensor:
        """returns  # [vocab]"""
        return (self._logits[row] - self.largest[row]).div_(self._temperatures[row])

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """rows  # [m]
        returns  # [m, vocab]
        """
        return self._scale(self._logits[rows], rows[:, None])

    def tokens(self, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """rows, token_ids, returns  # [m]"""
        return self._scale(self._logits[rows, token_ids], rows)

    def top(self, rows: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The highest logits, descending, and their tokens; the order of a tie is arbitrary. They
        are fewer, or -inf for ids beyond the vocabulary, where that is smaller.

        rows     # [m] int64
        returns  # [m, num_tokens] float32, [m, num_tokens] int64
        """
        num_chunks = min(num_tokens, self._maxima.shape[1])
        chunks = self._maxima[rows].topk(num_chunks).indices
        logits = self._chunks[rows[:, None], chunks].flatten(1)
        highest, places = logits.topk(min(num_tokens, logits.shape[1]))
        chunks = chunks.gather(1, places // _CHUNK_LEN)
        return self._scale(highest, rows[:, None]), chunks * _CHUNK_LEN + places % _CHUNK_LEN

    def descending(self, rows: torch.Tensor, num_ranked: int) -> torch.Tensor:
        """The highest logits, or all if they are fewer, in order. For many of them quicker than
        `top`: on a CPU by numpy, whose sort is many times as fast as torch's.

        rows     # [m] int64
        returns  # [m, num_ranked]
        """
        num_ranked = min(num_ranked, self.vocab_size)
        negated = self.rows(rows).neg_()
        if negated.device.type != "cpu":
            return negated.topk(num_ranked, largest=False).values.neg_()
        values = negated.numpy()
        values.partition(num_ranked - 1, axis=-1)
        return torch.from_numpy(np.sort(values[:, :num_ranked], axis=-1)).neg_()

    def _scale(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """In place; shapes broadcast."""
        return logits.sub_(self.largest[rows]).div_(self._temperatures[rows])


def _in_chunks(logits: torch.Tensor) -> torch.Tensor:
    """[n, num_chunks, _CHUNK_LEN]; -inf beyond the vocabulary."""
    if padding := -logits.shape[-1] % _CHUNK_LEN:
        logits = torch.nn.functional.pad(logits, (0, padding), value=-torch.inf)
    return logits.reshape(len(logits), -1, _CHUNK_LEN)
