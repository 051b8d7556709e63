"""What of two replies must be equal."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

Reply = dict[str, Any]
Choices = dict[int, dict[str, Any]]

NOT_COMPARED = ("id", "created", "speculation", "metrics")
"""What a reply says of itself and of its making."""


def comparable(body: Reply) -> Reply:
    """All but what is random, and the counts of a client's own prediction."""
    kept = copy.deepcopy({key: body[key] for key in body.keys() - set(NOT_COMPARED)})
    for choice in kept["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or ():
            call["id"] = "call"
    details = kept["usage"]["completion_tokens_details"]
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        del details[name]
    return kept


def whole_choices(body: Reply) -> Choices:
    """The choices of a reply, by index."""
    choices = {}
    for choice in body["choices"]:
        message = choice.get("message", {})
        choices[choice["index"]] = {
            "text": choice.get("text") or message.get("content") or "",
            "calls": {
                index: {key: call["function"][key] for key in ("name", "arguments")}
                for index, call in enumerate(message.get("tool_calls") or ())
            },
            "finish_reason": choice["finish_reason"],
            "logprobs": _logprobs(choice.get("logprobs")),
        }
    return choices


def joined(chunks: Iterable[Reply]) -> Choices:
    """The same, added up from the chunks of a stream."""
    choices: Choices = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            whole = choices.setdefault(
                piece["index"], {"text": "", "calls": {}, "finish_reason": None, "logprobs": []}
            )
            delta = piece.get("delta", {})
            whole["text"] += piece.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                known = whole["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                for key, part in call["function"].items():
                    known[key] += part
            whole["logprobs"] += _logprobs(piece.get("logprobs"))
            assert whole["finish_reason"] is None, "something came after the end"
            whole["finish_reason"] = piece["finish_reason"]
    return choices


def _logprobs(told: dict[str, Any] | None) -> list[Any]:
    """One entry for each token, in either API's shape."""
    if told is None:
        return []
    if "content" in told:
        return list(told["content"] or ())
    return list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True))
