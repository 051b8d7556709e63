"""Replies in the shapes that OpenAI's clients and load tools read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.types import FinishReason, TokenLogprobs
from router.choice import Delta, SpeculationTally
from router.logprobs import Entries, chat_logprobs, completion_logprobs
from router.reply import Reply
from router.schema import SamplingFields
from router.tokenizer import Tokenizer

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """All of one choice."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: Entries


class ReplyShape(Protocol):
    """What differs between the two generation endpoints."""

    id_prefix: str
    body_object: str
    chunk_object: str

    def choice(self, choice: FinishedChoice) -> Json:
        """A choice of a whole reply."""
        ...

    def chunk_choice(self, delta: Delta, text: str, first: bool) -> Json:
        """A choice of a chunk."""
        ...

    def logprobs(self, tokenizer: Tokenizer, entries: Entries, offset: int) -> Json:
        """Log probabilities of a choice, or of a chunk whose text begins at `offset`."""
        ...


class ChatShape:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    body_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, choice: FinishedChoice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": None,
            "finish_reason": choice.finish_reason.value,
        }

    def chunk_choice(self, delta: Delta, text: str, first: bool) -> Json:
        return {
            "index": delta.index,
            # The role comes with the first text: alone it would look like a first token.
            "delta": {"role": "assistant", "content": text} if first else {"content": text},
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }

    def logprobs(self, tokenizer: Tokenizer, entries: Entries, offset: int) -> Json:
        return chat_logprobs(tokenizer, entries)


class CompletionShape:
    """/v1/completions."""

    id_prefix = "cmpl-"
    body_object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, choice: FinishedChoice) -> Json:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason.value,
        }

    def chunk_choice(self, delta: Delta, text: str, first: bool) -> Json:
        return {
            "index": delta.index,
            "text": text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }

    def logprobs(self, tokenizer: Tokenizer, entries: Entries, offset: int) -> Json:
        return completion_logprobs(tokenizer, entries, offset)


def body(reply: Reply, shape: ReplyShape, choices: Sequence[FinishedChoice]) -> Json:
    """A whole reply."""
    written = [shape.choice(choice) for choice in choices]
    if reply.plan.num_top_logprobs is not None:
        for choice, value in zip(choices, written, strict=True):
            offset = len(reply.echo(choice.index))
            value["logprobs"] = shape.logprobs(reply.tokenizer, choice.logprobs, offset)
    return {
        **_head(reply, shape.id_prefix, shape.body_object),
        "choices": written,
        "usage": usage(reply),
        **_figures(reply),
    }


class ChunkWriter:
    """Writes the chunks of one stream."""

    def __init__(self, reply: Reply, shape: ReplyShape, request: SamplingFields) -> None:
        self._reply = reply
        self._shape = shape
        self._request = request
        self._head = _head(reply, shape.id_prefix, shape.chunk_object)
        self._begun: set[int] = set()
        self._held_logprobs: dict[int, list[tuple[int, TokenLogprobs]]] = {}
        """By choice, of tokens that had no text to show yet."""
        self._offsets: dict[int, int] = {}
        """By choice, characters shown so far."""
        self._num_unfinished = len(reply.choices)

    def delta(self, delta: Delta) -> bytes:
        """The event of a delta; empty if it has nothing to show yet."""
        finished = delta.finish_reason is not None
        held = self._held_logprobs.setdefault(delta.index, [])
        held += delta.logprobs
        if not (delta.text or finished):
            return b""
        self._num_unfinished -= finished
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        text = self._reply.echo(delta.index) + delta.text if first else delta.text
        choice = self._shape.chunk_choice(delta, text, first)
        if self._reply.plan.num_top_logprobs is not None:
            offset = self._offsets.get(delta.index, len(self._reply.echo(delta.index)))
            choice["logprobs"] = self._shape.logprobs(self._reply.tokenizer, held, offset)
            self._offsets[delta.index] = offset + len(delta.text)
            held.clear()
        if self._request.trace:
            choice["speculation"] = _trace(delta)
        chunk = {**self._head, "choices": [choice]}
        if self._request.usage_in_every_chunk:
            chunk["usage"] = usage(self._reply)
        if self._num_unfinished == 0 and not self._request.usage_in_stream:
            chunk |= _figures(self._reply)
        return event(chunk)

    def tail(self) -> bytes:
        """What follows the last delta."""
        if not self._request.usage_in_stream:
            return DONE
        chunk = {**self._head, "choices": [], "usage": usage(self._reply)}
        return event(chunk | _figures(self._reply)) + DONE


def event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


def encode_json(value: Mapping[str, Any]) -> bytes:
    """Compact JSON."""
    return _ENCODER.encode(value).encode()


def usage(reply: Reply) -> Json:
    """Token counts: what was delivered."""
    num_prompt, num_completion = reply.num_prompt_tokens, reply.num_completion_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": reply.num_cached_prompt_tokens},
        # OpenAI's two counts are of the client's own prediction, not of a drafter's.
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def speculation(reply: Reply, tally: SpeculationTally) -> Json:
    """Paceline's own account of what speculation did for this request."""
    return {
        "path": reply.decision.path.value,
        "reason": reply.decision.reason,
        "drafter": tally.drafter or None,
        "num_steps": tally.num_steps,
        "num_draft_tokens": tally.num_draft_tokens,
        "num_accepted_tokens": tally.num_accepted_tokens,
        "acceptance_per_position": tally.acceptance_per_position,
    }


def vllm_metrics(tally: SpeculationTally) -> Json | None:
    """vLLM's per-request form, which aiperf reads; None without drafts, as vLLM does.

    The bound on drafts varies from step to step, so `num_spec_tokens` is left out.
    """
    if tally.num_draft_steps == 0:
        return None
    accepted, drafted = tally.num_accepted_tokens, tally.num_draft_tokens
    return {
        "mean_acceptance_length": 1 + accepted / tally.num_draft_steps,
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": [
            tally.accepted_histogram[count] for count in range(len(tally.drafted_per_position) + 1)
        ],
        "num_spec_steps": tally.num_draft_steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }


def _head(reply: Reply, id_prefix: str, kind: str) -> Json:
    return {
        "id": id_prefix + reply.id,
        "object": kind,
        "created": reply.created,
        "model": reply.card.name,
        "system_fingerprint": reply.card.fingerprint or None,
    }


def _figures(reply: Reply) -> Json:
    tally = reply.tally()
    alone = len(reply.choices) == 1
    figures = vllm_metrics(tally) if alone else None
    return {
        "speculation": speculation(reply, tally),
        "metrics": {"speculative_decoding": figures},
    }


def _trace(delta: Delta) -> Json:
    return {
        "num_tokens": delta.num_tokens,
        "num_draft_tokens": delta.num_draft_tokens,
        "num_accepted_tokens": delta.num_accepted_tokens,
        "refused_token_ids": delta.refused_ids,
        "accepted_spans": delta.accepted_spans,
    }
