"""Replies in the shapes that OpenAI's clients and load tools read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cluster.types import FinishReason
from router.choice import Delta, SpeculationTally
from router.logprobs import ChatLogprobs, CompletionLogprobs, Entries, LogprobsWriter
from router.message import Call, CallDelta, Message, MessageDelta, joined
from router.message_reader import MessageForm, MessageReader
from router.reply import Reply
from router.schema import SamplingFields

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

    def choice(self, index: int, message: Message, finish_reason: str) -> Json:
        """A choice of a whole reply."""
        ...

    def chunk_choice(
        self, index: int, delta: MessageDelta, finish_reason: str | None, first: bool
    ) -> Json:
        """A choice of a chunk."""
        ...

    def logprobs(self, reply: Reply, index: int) -> LogprobsWriter:
        """Writes the log probabilities of a choice, whose first tokens have come."""
        ...


class ChatShape:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    body_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, message: Message, finish_reason: str) -> Json:
        only_else = not message.content and (message.calls or message.reasoning)
        written: Json = {
            "role": "assistant",
            "content": None if only_else else message.content,
            "refusal": None,
        }
        if message.reasoning:
            written["reasoning_content"] = message.reasoning
        if message.calls:
            written["tool_calls"] = [_call(call) for call in message.calls]
        return {
            "index": index,
            "message": written,
            "logprobs": None,
            "finish_reason": finish_reason,
        }

    def chunk_choice(
        self, index: int, delta: MessageDelta, finish_reason: str | None, first: bool
    ) -> Json:
        # The role comes with what is first of the message: alone it would look like a first token.
        written: Json = {"role": "assistant"} if first else {}
        if delta.content or not delta:
            written["content"] = delta.content
        if delta.reasoning:
            written["reasoning_content"] = delta.reasoning
        if delta.calls:
            written["tool_calls"] = [_call_delta(call) for call in delta.calls]
        return {
            "index": index,
            "delta": written,
            "logprobs": None,
            "finish_reason": finish_reason,
        }

    def logprobs(self, reply: Reply, index: int) -> LogprobsWriter:
        return ChatLogprobs(reply.tokenizer)


class CompletionShape:
    """/v1/completions."""

    id_prefix = "cmpl-"
    body_object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int, message: Message, finish_reason: str) -> Json:
        return {
            "index": index,
            "text": message.content,
            "logprobs": None,
            "finish_reason": finish_reason,
        }

    def chunk_choice(
        self, index: int, delta: MessageDelta, finish_reason: str | None, first: bool
    ) -> Json:
        return {
            "index": index,
            "text": delta.content,
            "logprobs": None,
            "finish_reason": finish_reason,
        }

    def logprobs(self, reply: Reply, index: int) -> LogprobsWriter:
        return CompletionLogprobs(reply.tokenizer, reply.echo(index), reply.prompt_entries(index))


def body(reply: Reply, shape: ReplyShape, choices: Sequence[FinishedChoice]) -> Json:
    """A whole reply."""
    written = [_choice(shape, reply.plan.form, choice) for choice in choices]
    if reply.plan.num_top_logprobs is not None:
        for choice, value in zip(choices, written, strict=True):
            value["logprobs"] = shape.logprobs(reply, choice.index).part(choice.logprobs)
    return {
        **_head(reply, shape.id_prefix, shape.body_object),
        "choices": written,
        "usage": usage(reply),
        **_figures(reply),
    }


def _choice(shape: ReplyShape, form: MessageForm, choice: FinishedChoice) -> Json:
    message, called = form.read(choice.text)
    return shape.choice(choice.index, message, form.finish_reason(choice.finish_reason, called))


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(call: CallDelta) -> Json:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_call(Call(call.id, call.name, call.arguments))}


class ChunkWriter:
    """Writes the chunks of one stream."""

    def __init__(self, reply: Reply, shape: ReplyShape, request: SamplingFields) -> None:
        self._reply = reply
        self._shape = shape
        self._request = request
        self._head = _head(reply, shape.id_prefix, shape.chunk_object)
        self._begun: set[int] = set()
        self._held: dict[int, Delta] = {}
        """By choice, what had nothing to show yet."""
        form = reply.plan.form
        self._readers = {choice.index: MessageReader(form) for choice in reply.choices}
        self._logprobs: dict[int, LogprobsWriter] = {}
        """By choice."""
        self._num_unfinished = len(reply.choices)

    def delta(self, delta: Delta) -> bytes:
        """The event of a delta; empty if it has nothing to show yet."""
        message, finish_reason = self._read(delta)
        if delta.index in self._held:
            delta = self._held.pop(delta.index).then(delta)
        if not message and finish_reason is None:
            self._held[delta.index] = delta
            return b""
        self._num_unfinished -= finish_reason is not None
        chunk = {**self._head, "choices": [self._choice(delta, message, finish_reason)]}
        if self._request.usage_in_every_chunk:
            chunk["usage"] = usage(self._reply)
        if self._num_unfinished == 0 and not self._request.usage_in_stream:
            chunk |= _figures(self._reply)
        return event(chunk)

    def _read(self, delta: Delta) -> tuple[MessageDelta, str | None]:
        """(what a delta adds to the message, why that ends if it does)."""
        reader = self._readers[delta.index]
        message = reader.push(delta.text)
        if delta.finish_reason is None:
            return message, None
        message = joined([message, reader.finish()])
        return message, self._reply.plan.form.finish_reason(delta.finish_reason, reader.called)

    def _choice(self, delta: Delta, message: MessageDelta, finish_reason: str | None) -> Json:
        index = delta.index
        first = index not in self._begun
        self._begun.add(index)
        shown = replace(message, content=self._reply.echo(index) + message.content)
        choice = self._shape.chunk_choice(index, shown if first else message, finish_reason, first)
        if self._reply.plan.num_top_logprobs is not None:
            if first:
                self._logprobs[index] = self._shape.logprobs(self._reply, index)
            choice["logprobs"] = self._logprobs[index].part(delta.logprobs)
        if self._request.trace:
            choice["speculation"] = _trace(delta, is_content=message.content == delta.text)
        return choice

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
        # The last two are of the client's own prediction, not of a drafter's: its tokens that
        # appear in the completion, and those that do not.
        "completion_tokens_details": {
            "reasoning_tokens": reply.num_reasoning_tokens,
            "accepted_prediction_tokens": reply.num_predicted_tokens,
            "rejected_prediction_tokens": reply.num_unused_prediction_tokens,
        },
    }


def speculation(reply: Reply, tally: SpeculationTally) -> Json:
    """Paceline's own account of what speculation did for this request."""
    return {
        "path": reply.decision.path.value,
        "reason": reply.decision.reason,
        "drafter": tally.drafter or None,
        "drafters": {
            name: {
                "num_draft_tokens": tally.drafted_by[name],
                "num_accepted_tokens": tally.accepted_by[name],
            }
            for name in tally.drafted_by
        },
        "num_steps": tally.num_steps,
        "num_draft_tokens": tally.num_draft_tokens,
        "num_accepted_tokens": tally.num_accepted_tokens,
        "acceptance_per_position": tally.acceptance_per_position,
        "num_resyncs": tally.num_resyncs,
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


def _trace(delta: Delta, *, is_content: bool) -> Json:
    """Spans tell of content; where that is not all of the text, they are left out."""
    return {
        "num_tokens": delta.num_tokens,
        "num_draft_tokens": delta.num_draft_tokens,
        "num_accepted_tokens": delta.num_accepted_tokens,
        "refused_token_ids": delta.refused_ids,
        "accepted_spans": delta.accepted_spans if is_content else (),
    }
