"""How models write calls. A call is spelled in one way, which is what the grammar forces; the
reader takes other spacing too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A call is marker, before_name, name, before_arguments, arguments, end, one after the other.
    The arguments are a JSON object."""

    name: str
    """As configured in tool_call_format."""
    marker: str
    """Says that a call follows, anywhere in a text. Empty: calls stand at the start of a message
    or not at all."""
    before_name: str
    before_arguments: str
    end: str
    separator: str = ""
    """Between two calls; empty if a message holds no more than one."""
    special_prefix: str = ""
    """Special token that may stand before the first call."""

    def write(self, name: str, arguments: str) -> str:
        """A call as a model writes it."""
        return f"{self.marker}{self.before_name}{name}{self.before_arguments}{arguments}{self.end}"


HERMES = CallFormat(
    "hermes",
    marker="<tool_call>",
    before_name='\n{"name": "',
    before_arguments='", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
)
LLAMA3_JSON = CallFormat(
    "llama3_json",
    marker="",
    before_name='{"name": "',
    before_arguments='", "parameters": ',
    end="}",
    special_prefix="<|python_tag|>",
)
FORMATS: Mapping[str, CallFormat] = {form.name: form for form in (HERMES, LLAMA3_JSON)}


def format_of_template(source: str) -> CallFormat | None:
    """The format that a chat template teaches its model, None if it is none of ours."""
    plain = source.replace("\\", "")  # Quotes within a template's strings.
    if "<tool_call>" in plain and '"arguments":' in plain:
        return HERMES
    if "<|start_header_id|>" in plain and '{"name":' in plain and '"parameters":' in plain:
        return LLAMA3_JSON
    return None


def arguments_object(arguments: str) -> Any:
    """Arguments of an earlier call as templates want them: an object. What is none, such as a call
    that was cut at max_tokens, stays as it is."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and _is_shallow(value) else arguments


_MAX_DEPTH = 32


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return True
    return False


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
