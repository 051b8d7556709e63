"""The target as the router needs it."""

from __future__ import annotations

from cluster.errors import ModelNotFoundError
from cluster.grammar_check import GrammarChecker
from cluster.types import ModelCard
from router.chat import ChatTemplate
from router.tokenizer import Tokenizer
from router.tools.call_format import FORMATS, HERMES, CallFormat, format_of_template


class ServedModel:
    """A model with what reads and writes its text."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.tokenizer = Tokenizer(card)
        self.template = ChatTemplate(card, self.tokenizer)
        self.grammar_checker = GrammarChecker(card.tokenizer_json, card.vocab_size)

    def check_name(self, name: str | None) -> None:
        """Raise ModelNotFoundError unless this is the model that `name` means."""
        if name is not None and name != self.card.name:
            raise ModelNotFoundError(
                f"the model {name!r} is not served here; {self.card.name!r} is",
                param="model",
                code="model_not_found",
            )

    def call_format(self, configured: str) -> CallFormat | None:
        """How it writes calls, given RouterConfig.tool_call_format; None if that is not known. A
        model whose template knows no tools is told of them, and of a format, by us."""
        if configured != "auto":
            return FORMATS[configured]
        if not self.template.renders_tools:
            return HERMES
        return format_of_template(self.card.chat_template)
