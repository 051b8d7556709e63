"""Server-sent events as a strict reader takes them apart."""

from __future__ import annotations

import json
from typing import Any


def events(text: str) -> list[Any]:
    """The JSON of every event, "[DONE]" as it is."""
    assert text.endswith("\n\n")
    found = []
    for record in text.removesuffix("\n\n").split("\n\n"):
        assert record.startswith("data: ")
        data = record.removeprefix("data: ")
        assert "\n" not in data
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def chat_text(chunks: list[Any], index: int = 0) -> str:
    """Text of one choice of a stream."""
    choices = [c for chunk in chunks if chunk != "[DONE]" for c in chunk["choices"]]
    return "".join(c["delta"].get("content", "") for c in choices if c["index"] == index)


def finish_reasons(chunks: list[Any]) -> list[str]:
    choices = [c for chunk in chunks if chunk != "[DONE]" for c in chunk["choices"]]
    return [c["finish_reason"] for c in choices if c["finish_reason"] is not None]
