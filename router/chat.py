"""Chat messages to token ids, by the model's own template.

The template comes with the model, never from a request, and runs in jinja's sandbox as
transformers runs it. Messages are data: no text in them can become a special token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.errors import InvalidRequestError
from cluster.types import ModelCard
from router.tokenizer import Tokenizer

MAX_RENDERED_CHARS = 16 << 20

Message = dict[str, Any]

# What a template may raise on messages it does not expect.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """Renders conversations of one model."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._variables = {
            "bos_token": card.bos_token,
            "eos_token": card.eos_token,
            "pad_token": card.pad_token,
        }
        self._template = _compile(card.chat_template) if card.chat_template else None

    def encode(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Ids of a conversation; by default up to where the assistant is to speak.

        Raises InvalidRequestError (param messages) if the template refuses the conversation.
        """
        guard = _unused_char(messages)
        guarded = [self._guard_message(message, guard) for message in messages]
        if guarded == list(messages):
            return self._tokenizer.encode_rendered(self.render(messages, add_generation_prompt))
        return self._tokenizer.encode_guarded(self.render(guarded, add_generation_prompt), guard)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as the template writes it."""
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._variables
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise ValueError(f"the conversation renders to over {MAX_RENDERED_CHARS} chars")
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return "".join(pieces)

    def _guard_message(self, message: Message, guard: str) -> Message:
        return {
            key: value if key == "role" else self._guard(value, guard)
            for key, value in message.items()
        }

    def _guard(self, value: Any, guard: str) -> Any:
        if isinstance(value, str):
            return self._tokenizer.guard_text(value, guard)
        if isinstance(value, Mapping):
            return {self._guard(k, guard): self._guard(v, guard) for k, v in value.items()}
        if isinstance(value, list):
            return [self._guard(item, guard) for item in value]
        return value


def _unused_char(messages: Sequence[Message]) -> str:
    """A private-use character that no message holds."""
    used = set(json.dumps(messages, ensure_ascii=False))
    for code in range(0xF0000, 0xFFFFE):
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequestError("the messages use every private-use character", param="messages")


# --- jinja as transformers sets it up ----------------------------------------------------------


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own, escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
