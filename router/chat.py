"""Chat messages to token ids, by the model's own template.

The template comes with the model, never from a request, and runs in jinja's sandbox as
transformers runs it. Messages are data: no text in them can become a special token.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.errors import InvalidRequestError
from cluster.types import ModelCard
from router.tokenizer import Tokenizer

MAX_RENDERED_CHARS = 16 << 20

Message = dict[str, Any]
NOTHING: Mapping[str, Any] = MappingProxyType({})

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
        self.renders_tools = "tools" in _variables_of(card.chat_template)
        """It tells the model of tools, and writes calls and results."""

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = NOTHING,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """Ids of a conversation; by default up to where the assistant is to speak. `variables` are
        the client's own, for the template.

        Raises InvalidRequestError (param messages) if the template refuses the conversation.
        """
        self._check_variables(variables)
        given = {**variables, "messages": list(messages), "tools": list(tools) or None}
        guard = _unused_char(given)
        guarded = self._guard(variables, guard) | {
            "messages": [self._guard_message(message, guard) for message in messages],
            "tools": self._guard(given["tools"], guard),
        }
        if guarded == given:
            return self._tokenizer.encode_rendered(self._render(given, add_generation_prompt))
        return self._tokenizer.encode_guarded(self._render(guarded, add_generation_prompt), guard)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as the template writes it, up to where the assistant is to speak."""
        return self._render({"messages": messages}, add_generation_prompt=True)

    def _render(self, given: Mapping[str, Any], add_generation_prompt: bool) -> str:
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                {**given, **self._variables, "add_generation_prompt": add_generation_prompt}
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

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if name in self._variables or name in ("messages", "tools", "add_generation_prompt"):
                raise InvalidRequestError(
                    f"chat_template_kwargs.{name} is not for clients to set",
                    param=f"chat_template_kwargs.{name}",
                )

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


def _unused_char(given: Mapping[str, Any]) -> str:
    """A private-use character that no text of the conversation holds."""
    used = set(json.dumps(given, ensure_ascii=False))
    for code in range(0xF0000, 0xFFFFE):
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequestError("the messages use every private-use character", param="messages")


# --- jinja as transformers sets it up ----------------------------------------------------------


def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _variables_of(source: str) -> set[str]:
    """What a template takes from outside."""
    return meta.find_undeclared_variables(_environment().parse(source))


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


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
