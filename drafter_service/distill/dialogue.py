"""How conversations with a target are written, as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from cluster.types import ModelCard

_QUESTION_MARK = "\u2042 question \u2042"
"""Stands for the question while the template is looked at; unlikely in any template."""


class Dialogue:
    """Of a target with a chat template; one without simply goes on with a text."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._tokenizer = Tokenizer.from_str(card.tokenizer_json)
        before, _, _ = self._render(_QUESTION_MARK).partition(_QUESTION_MARK)
        self.before_question = self._encode(before) or self._first_ids()
        """What precedes a user's words: after these the target writes a question itself."""

    def question(self, text: str) -> tuple[int, ...]:
        """Up to where the target is to answer."""
        return self._encode(self._render(text)) or self._first_ids()

    def text(self, text: str) -> tuple[int, ...]:
        """A text that is no conversation."""
        return (*self._first_ids(), *self._encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids))

    def _render(self, question: str) -> str:
        card = self._card
        if not card.chat_template:
            return f"{question}\n"
        rendered, _ = render_jinja_template(
            conversations=[[{"role": "user", "content": question}]],
            chat_template=card.chat_template,
            add_generation_prompt=True,
            bos_token=card.bos_token,
            eos_token=card.eos_token,
            pad_token=card.pad_token,
        )
        return str(rendered[0])

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _first_ids(self) -> tuple[int, ...]:
        """What a text begins with."""
        first = self._encode(self._card.bos_token) if self._card.bos_token else ()
        return first or self._card.eos_token_ids[:1] or (0,)
