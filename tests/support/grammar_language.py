"""A tokenizer and the grammars over it, for tests that generate without a model."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.grammar import GrammarError, GrammarKind, GrammarSpec
from cluster.types import ModelCard
from engine.embedded import embedded_model_folder
from engine.grammar import GrammarCompiler, GrammarState
from router.tokenizer import Tokenizer
from tests.support.tiny_models import save_tokenizer

EOS_ID = 2
VOCAB_SIZE = 49152 + 100
"""The embedded model's vocabulary, and rows behind it as padded models have them."""


@dataclass(frozen=True)
class Language:
    """A tokenizer and the grammars over it."""

    compiler: GrammarCompiler
    tokenizer: Tokenizer

    def compile(self, kind: GrammarKind, text: str = "") -> GrammarState:
        return self.compiler.compile(GrammarSpec(kind, text))

    def schema(self, schema: object) -> GrammarState:
        return self.compile(GrammarKind.JSON_SCHEMA, json.dumps(schema))

    @property
    def closing_ids(self) -> list[int]:
        """Tokens that bring a JSON text nearer to its end."""
        return [EOS_ID, *(self.ids(text)[0] for text in ('"', "}", "]", ",", '"}', '"]'))]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def takes(self, state: GrammarState, text: str) -> bool:
        """Whether the whole text, and its end, may be generated from the start."""
        token_ids = [*self.ids(text), EOS_ID]
        if state.valid_prefix_len(token_ids) < len(token_ids):
            return False
        try:
            state.commit(token_ids)
        except GrammarError:
            return False
        return state.finished


def _language(tokenizer_json: str, vocab_size: int) -> Language:
    card = ModelCard(
        name="model",
        max_model_len=4096,
        vocab_size=vocab_size,
        vocabulary="",
        fingerprint="",
        eos_token_ids=(EOS_ID,),
        tokenizer_json=tokenizer_json,
        chat_template="",
    )
    return Language(GrammarCompiler(tokenizer_json, vocab_size, (EOS_ID,)), Tokenizer(card))


@functools.cache
def embedded_language() -> Language:
    """That of the embedded model. Read once; its process ends with this one."""
    return _language((embedded_model_folder() / "tokenizer.json").read_text(), VOCAB_SIZE)


@functools.cache
def tiny_language() -> Language:
    """One character is one token, and the tokenizer is of no kind that llguidance knows."""
    with TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), 128)
        return _language((Path(folder) / "tokenizer.json").read_text(), 128)
