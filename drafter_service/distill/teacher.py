"""The target as a teacher: it writes, or reads, and its likeliest tokens are noted on the way.

It decodes as a verifier does, many sequences at a time. What it writes is a function of the request
alone, so a corpus that was interrupted goes on as if it had not been.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from cluster.types import SamplingParams
from drafter_service.distill.lesson import Lesson
from engine.decoder import SequenceSlice
from engine.kv_cache import SequenceCache
from engine.model_runner import ModelRunner
from engine.scaled_logits import ScaledLogits
from engine.target import Block, draw

NUM_CANDIDATES = 32
"""Tokens noted at each place; a language model gives the others a few percent together."""
_READ_TOKENS = 128
"""A text is read in pieces of so many, since each gives a row of logits over the vocabulary."""


@dataclass(frozen=True, slots=True)
class Request:
    """A text to go on with."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    request_key: int
    max_tokens: int


@dataclass(slots=True, eq=False)
class _Writing:
    """A request that is being answered."""

    index: int
    request: Request
    cache: SequenceCache
    token_ids: list[int]
    """Prompt and answer."""
    top_ids: list[torch.Tensor] = field(default_factory=list)
    top_log_probs: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_written(self) -> int:
        return len(self.top_ids)

    def slice(self) -> SequenceSlice:
        start = self.cache.num_committed
        return SequenceSlice(self.cache.block_table, start, self.token_ids[start:], 1)

    def block(self) -> Block:
        request, num_tokens = self.request, len(self.token_ids)
        return Block(request.sampling, request.request_key, num_tokens, (), 1, None)

    def lesson(self) -> Lesson:
        return Lesson(
            torch.tensor(self.token_ids, dtype=torch.int32),
            len(self.request.prompt_ids),
            torch.stack(self.top_ids),
            torch.stack(self.top_log_probs),
        )


class Teacher:
    """Writes and reads with one model. Not thread safe."""

    def __init__(self, runner: ModelRunner, batch_size: int) -> None:
        """`batch_size`: sequences that are written at a time, if the KV pool holds them."""
        self._runner = runner
        self._batch_size = batch_size
        self._end_ids = frozenset(runner.card.eos_token_ids)

    def write(
        self, requests: Sequence[Request], on_tokens: Callable[[int], None] = lambda _: None
    ) -> list[Lesson]:
        """Answer all, each up to the end or its max_tokens; `on_tokens` hears of how many tokens
        each step wrote."""
        waiting = deque(enumerate(requests))
        lessons: dict[int, Lesson] = {}
        writings: list[_Writing] = []
        while waiting or writings:
            self._admit(waiting, writings)
            self._step(writings)
            on_tokens(len(writings))
            for writing in [w for w in writings if self._is_over(w)]:
                self._runner.kv.close(writing.cache)
                lessons[writing.index] = writing.lesson()
                writings.remove(writing)
        return [lessons[index] for index in range(len(requests))]

    def read(self, token_ids: Sequence[int]) -> Lesson:
        """A given text, of which all but the first token is to be learned."""
        kv, runner = self._runner.kv, self._runner
        cache = kv.open()
        assert kv.reserve(cache, len(token_ids) - 1), "the KV pool holds one sequence at least"
        notes = []
        for start in range(0, len(token_ids) - 1, _READ_TOKENS):
            piece = token_ids[start : min(start + _READ_TOKENS, len(token_ids) - 1)]
            logits = runner.forward([SequenceSlice(cache.block_table, start, piece, len(piece))])
            notes.append(_candidates(logits))
        kv.close(cache)
        ids, log_probs = (torch.cat(column) for column in zip(*notes, strict=True))
        return Lesson(torch.tensor(token_ids, dtype=torch.int32), 1, ids, log_probs)

    def _admit(self, waiting: deque[tuple[int, Request]], writings: list[_Writing]) -> None:
        """Requests that have a place and all the KV they may come to need."""
        kv = self._runner.kv
        while waiting and len(writings) < self._batch_size:
            index, request = waiting[0]
            num_slots = len(request.prompt_ids) + request.max_tokens
            cache = kv.open(kv.find(request.prompt_ids))
            if not kv.reserve(cache, num_slots - cache.num_committed):
                kv.close(cache)
                assert writings, "the KV pool holds one sequence at least"
                return
            waiting.popleft()
            writings.append(_Writing(index, request, cache, list(request.prompt_ids)))

    def _step(self, writings: Sequence[_Writing]) -> None:
        """One more token for each."""
        slices = [writing.slice() for writing in writings]
        logits = self._runner.forward(slices)
        top_ids, top_log_probs = _candidates(logits)
        drawn = draw(logits, [writing.block() for writing in writings])
        for i, (writing, piece) in enumerate(zip(writings, slices, strict=True)):
            self._runner.kv.commit(writing.cache, piece.token_ids)
            (token_id,) = drawn[i].token_ids
            assert token_id is not None, "the target's logits are not finite"
            writing.token_ids.append(token_id)
            writing.top_ids.append(top_ids[i])
            writing.top_log_probs.append(top_log_probs[i])

    def _is_over(self, writing: _Writing) -> bool:
        ended = writing.token_ids[-1] in self._end_ids
        return ended or writing.num_written >= writing.request.max_tokens


def _candidates(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each row and their log probabilities.

    logits   # [n, vocab] float32
    returns  # [n, num_candidates] int32 and float16, on the CPU
    """
    scaled = ScaledLogits(logits, [1.0] * len(logits))
    rows = torch.arange(len(logits), device=logits.device)
    values, token_ids = scaled.top(rows, min(NUM_CANDIDATES, logits.shape[1]))
    log_sums = torch.logsumexp(logits, dim=-1) - scaled.largest
    log_probs = values - log_sums[:, None]
    return token_ids.to("cpu", torch.int32), log_probs.to("cpu", torch.float16)
