"""Tools for models whose chat template knows none: told in the system message, and earlier calls
and results written as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.tools.call_format import CallFormat

Message = dict[str, Any]


def spelled_out(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], form: CallFormat
) -> list[Message]:
    """A conversation without tools, calls and results as such. Results in a row are one turn of
    the user's."""
    plain: list[Message] = []
    for before, message in zip((None, *messages), messages, strict=False):
        if message["role"] != "tool":
            plain.append(_without_calls(message, form))
            continue
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        if before and before["role"] == "tool":
            plain[-1]["content"] += f"\n{result}"
        else:
            plain.append({"role": "user", "content": result})
    return _with_instructions(plain, tools, form) if tools else plain


def _without_calls(message: Message, form: CallFormat) -> Message:
    calls = message.get("tool_calls", ())
    written = [_written(call["function"], form) for call in calls]
    parts = [message["content"]] if message["content"] else []
    if written:
        parts.append(form.separator.join(written))
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(parts)}


def _written(function: Mapping[str, Any], form: CallFormat) -> str:
    arguments = function["arguments"]
    as_text = arguments if isinstance(arguments, str) else _json(arguments)
    return form.write(function["name"], as_text)


def _with_instructions(
    messages: list[Message], tools: Sequence[Mapping[str, Any]], form: CallFormat
) -> list[Message]:
    text = _instructions(tools, form)
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _instructions(tools: Sequence[Mapping[str, Any]], form: CallFormat) -> str:
    described = "\n".join(map(_json, tools))
    example = form.write("name_of_the_function", '{"name of an argument": "its value"}')
    return (
        "These functions can be called, each described as JSON on a line of its own:\n"
        f"<tools>\n{described}\n</tools>\n\n"
        "A call is written like this, with the function's name and its arguments as JSON:\n"
        f"{example}\n\n"
        "The result of a call follows between <tool_response> and </tool_response>. "
        "Where no function helps, answer in plain text."
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
