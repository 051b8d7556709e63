"""Grammars of requests: compiled apart from the engine, by a compiler that is made when needed."""

from __future__ import annotations

import threading

from cluster.types import GenerationRequest, ModelCard
from engine.grammar import GrammarCompiler, GrammarState


class Grammars:
    """One for a verifier. May be used from many threads."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def compile(self, request: GenerationRequest) -> GrammarState:
        """The state of the request's grammar, behind its resumed tokens. Raises GrammarError, or
        OverloadedError."""
        assert request.grammar is not None
        state = self._made().compile(request.grammar)
        state.commit(request.resumed_ids)
        return state

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()

    def _made(self) -> GrammarCompiler:
        """Reading the vocabulary takes a second, so a verifier without grammars never does."""
        card = self._card
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(
                    card.tokenizer_json, card.vocab_size, card.eos_token_ids
                )
            return self._compiler
