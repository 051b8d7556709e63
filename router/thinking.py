"""Models that think aloud before they answer: where that ends, and what is what.

What stands before `</think>` is reasoning, what follows is the answer. Whether a message begins
with reasoning is seen from the end of the prompt, where some templates begin it, or end it at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from router.message import MessageDelta
from router.tokenizer import Tokenizer

THINK, END_THINK = "<think>", "</think>"
_NUM_TAIL_TOKENS = 8


class Thinking(Enum):
    """How a message begins."""

    NONE = auto()
    """With the answer."""
    OPEN = auto()
    """In the midst of reasoning."""
    POSSIBLE = auto()
    """With `<think>` and reasoning, or with the answer."""


def thinking_after(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> Thinking:
    """How a message after this prompt begins. Models without tokens for it do not think."""
    if None in (tokenizer.token_id(THINK), tokenizer.token_id(END_THINK)):
        return Thinking.NONE
    tail = tokenizer.decode(prompt_ids[-_NUM_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    if tail.endswith(THINK):
        return Thinking.OPEN
    return Thinking.NONE if tail.endswith(END_THINK) else Thinking.POSSIBLE


class ReasoningCounter:
    """Counts the tokens of a message's reasoning, those around it included."""

    def __init__(self, thinking: Thinking, tokenizer: Tokenizer) -> None:
        self.num_tokens = 0
        self._thinking = thinking
        self._tokenizer = tokenizer
        self._start_id, self._end_id = tokenizer.token_id(THINK), tokenizer.token_id(END_THINK)
        self._num_before = 0
        """White space where reasoning may yet begin."""

    def push(self, token_ids: Sequence[int]) -> None:
        if self._thinking is Thinking.NONE:
            return
        for token_id in token_ids:
            if self._thinking is Thinking.POSSIBLE:
                self._look_for_start(token_id)
            elif self._thinking is Thinking.OPEN:
                self.num_tokens += 1
                if token_id == self._end_id:
                    self._thinking = Thinking.NONE

    def _look_for_start(self, token_id: int) -> None:
        self._num_before += 1
        if token_id == self._start_id:
            self._thinking, self.num_tokens = Thinking.OPEN, self._num_before
        elif self._tokenizer.decode((token_id,), skip_special_tokens=False).strip():
            self._thinking = Thinking.NONE


class ThinkingReader:
    """Splits a message's text as it comes into reasoning and answer. White space around the
    reasoning belongs to neither."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._held = ""
        self._trimming = thinking is Thinking.OPEN
        """White space at the start of what follows is dropped."""

    def push(self, text: str) -> tuple[MessageDelta, str]:
        """(reasoning, text of the answer) that this piece adds."""
        self._held += text
        if self._thinking is Thinking.POSSIBLE:
            self._look_for_start()
        reasoning = self._read_reasoning() if self._thinking is Thinking.OPEN else ""
        return MessageDelta(reasoning=reasoning), self._read_answer()

    def finish(self) -> tuple[MessageDelta, str]:
        """What is left, when no text follows."""
        if self._thinking is Thinking.OPEN:
            return MessageDelta(reasoning=self._take(len(self._held)).rstrip()), ""
        return MessageDelta(), self._take(len(self._held))

    def _look_for_start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held = text[len(THINK) :]
            self._thinking, self._trimming = Thinking.OPEN, True
        elif not THINK.startswith(text):
            self._thinking = Thinking.NONE

    def _read_reasoning(self) -> str:
        if self._trimming:
            self._held = self._held.lstrip()
            self._trimming = not self._held
        end = self._held.find(END_THINK)
        if end >= 0:
            reasoning = self._take(end).rstrip()
            self._take(len(END_THINK))
            self._thinking, self._trimming = Thinking.NONE, True
            return reasoning
        return self._take(_settled_len(self._held))

    def _read_answer(self) -> str:
        if self._thinking is not Thinking.NONE:
            return ""
        if self._trimming:
            self._held = self._held.lstrip()
            self._trimming = not self._held
        return self._take(len(self._held))

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


def _settled_len(text: str) -> int:
    """How much of `text` is reasoning for sure: neither the beginning of the end nor white space
    before it."""
    longest = min(len(text), len(END_THINK) - 1)
    overlap = next((k for k in range(longest, 0, -1) if text.endswith(END_THINK[:k])), 0)
    return len(text[: len(text) - overlap].rstrip())
