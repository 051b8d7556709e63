"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.types import TokenLogprobs
from router.tokenizer import Tokenizer

Json = dict[str, Any]
Entries = Sequence[tuple[int, TokenLogprobs]]
"""Token ids and theirs."""

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot write; OpenAI's number."""


def chat_logprobs(tokenizer: Tokenizer, entries: Entries) -> Json:
    """Of a chat completion's choice or chunk."""
    content = []
    for token_id, one in entries:
        top = zip(one.top_ids, one.top_logprobs, strict=True)
        content.append(
            {
                **_entry(tokenizer, token_id, one.logprob),
                "top_logprobs": [_entry(tokenizer, top_id, value) for top_id, value in top],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, entries: Entries, offset: int) -> Json:
    """Of a completion's choice or chunk. `offset`: characters of the choice's text before it."""
    tokens = [tokenizer.token_text(token_id)[0] for token_id, _ in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(one.logprob) for _, one in entries],
        "top_logprobs": [_top(tokenizer, one) for _, one in entries],
        "text_offset": offsets,
    }


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> Json:
    text, raw = tokenizer.token_text(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def _top(tokenizer: Tokenizer, one: TokenLogprobs) -> dict[str, float]:
    """By text; of several tokens with one text the likeliest, which comes first."""
    by_text: dict[str, float] = {}
    for token_id, value in zip(one.top_ids, one.top_logprobs, strict=True):
        by_text.setdefault(tokenizer.token_text(token_id)[0], _finite(value))
    return by_text


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
