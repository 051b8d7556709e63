"""Functions to call, and models that call and think."""

from __future__ import annotations

import functools
from typing import Any

import tokenizers

from cluster.types import ModelCard
from tests.support.scripted_verifier import make_card

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]

HERMES_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    '{{ \'Write <tool_call>{"name": ..., "arguments": ...}</tool_call>\n\' }}'
    "{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'tool' %}{{ '[' + m.name + '] ' }}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}{{ '<tool_call>\n' }}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""Knows tools, and thinks unless it is told not to."""


@functools.cache
def thinking_card(**changes: Any) -> ModelCard:
    """The tiny card with tokens for thinking and calling, as Qwen3 has them, and a template that
    uses them. What it says in common with the tiny card has the same ids."""
    card = make_card()
    tokenizer = tokenizers.Tokenizer.from_str(card.tokenizer_json)
    tokenizer.add_tokens(["</think>", "<tool_call>", "</tool_call>"])
    fields = {
        "vocab_size": tokenizer.get_vocab_size(),
        "tokenizer_json": tokenizer.to_str(),
        "chat_template": HERMES_TEMPLATE,
    }
    return make_card(**(fields | changes))
