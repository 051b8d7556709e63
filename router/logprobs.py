"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from cluster.types import TokenLogprobs
from router.tokenizer import Tokenizer

Json = dict[str, Any]
Entries = Sequence[tuple[int, TokenLogprobs]]
"""Token ids and theirs."""
PromptEntries = Sequence[tuple[int, TokenLogprobs | None]]
"""The same of a prompt, whose first token has none."""

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot write; OpenAI's number."""


class LogprobsWriter(Protocol):
    """Writes those of one choice, part by part."""

    def part(self, entries: Entries) -> Json:
        """Of the choice's next tokens."""
        ...


class ChatLogprobs:
    """Of a chat completion's choice."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def part(self, entries: Entries) -> Json:
        content = []
        for token_id, one in entries:
            top = zip(one.top_ids, one.top_logprobs, strict=True)
            content.append(
                {
                    **self._entry(token_id, one.logprob),
                    "top_logprobs": [self._entry(top_id, value) for top_id, value in top],
                }
            )
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        text, raw = self._tokenizer.token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """Of a completion's choice; the first part begins with those of the prompt."""

    def __init__(self, tokenizer: Tokenizer, echo: str, prompt: PromptEntries) -> None:
        """`echo`: the choice's text before its own. `prompt`: empty if it is not to be told."""
        self._tokenizer = tokenizer
        self._prompt = prompt
        # A tokenizer may put a space before a prompt, which the text does not show.
        shown = len(tokenizer.decode(token_id for token_id, _ in prompt))
        self._prompt_offsets = _TextOffsets(tokenizer, len(echo) - shown)
        self._offsets = _TextOffsets(tokenizer, len(echo))

    def part(self, entries: Entries) -> Json:
        told: PromptEntries = (*self._prompt, *entries)
        offsets = self._prompt_offsets.next(token_id for token_id, _ in self._prompt)
        offsets += self._offsets.next(token_id for token_id, _ in entries)
        self._prompt = ()
        return {
            "tokens": [self._tokenizer.token_text(token_id)[0] for token_id, _ in told],
            "token_logprobs": [one and _finite(one.logprob) for _, one in told],
            "top_logprobs": [one and self._top(one) for _, one in told],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """By text; of several tokens with one text the likeliest, which comes first."""
        by_text: dict[str, float] = {}
        for token_id, value in zip(one.top_ids, one.top_logprobs, strict=True):
            by_text.setdefault(self._tokenizer.token_text(token_id)[0], _finite(value))
        return by_text


class _TextOffsets:
    """Where tokens begin in a text, in characters. All tokens of one character begin where it
    does, and a special token, which has no text, where the next one does."""

    def __init__(self, tokenizer: Tokenizer, start: int) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._offset = start

    def next(self, token_ids: Iterable[int]) -> list[int]:
        """Of the text's next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(max(0, self._offset))
            self._offset += len(self._detokenizer.push((token_id,)))
        return offsets


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
