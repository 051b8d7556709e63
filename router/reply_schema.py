"""What this server answers, for the OpenAPI document alone: replies are written in
openai_format.py, and tests/clients/test_fuzz.py holds the two against each other. A reply may hold
more than is named here."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Described(BaseModel):
    """Base of all that is described."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)


class ErrorDetail(Described):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: str | None


class ErrorReply(Described):
    """Every error."""

    error: ErrorDetail


class PromptTokensDetails(Described):
    """Of the prompt's tokens."""

    cached_tokens: int
    """Those that an earlier request had computed."""


class CompletionTokensDetails(Described):
    """Of the completion's tokens, and of the client's prediction."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    """Tokens of the prediction that appear in the completion."""
    rejected_prediction_tokens: int
    """Tokens of the prediction that do not."""


class Usage(Described):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SpeculationReport(Described):
    """What speculation did for this request."""

    path: Literal["speculative", "plain"]
    reason: str
    drafter: str | None
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_per_position: list[float]


class Generated(Described):
    """What both kinds of generation tell."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    usage: Usage
    speculation: SpeculationReport
    metrics: dict[str, Any]
    """`speculative_decoding` in vLLM's form, null without drafts."""


class CalledFunction(Described):
    """What is to be called, and with what."""

    name: str
    arguments: str
    """A JSON object, unless the answer was cut within it."""


class ToolCall(Described):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Described):
    """What the model answered."""

    role: Literal["assistant"]
    content: str | None
    """Null if there is only something else."""
    refusal: None
    reasoning_content: str | None = None
    """What the model thought before, if it did."""
    tool_calls: list[ToolCall] | None = None
    """Absent without calls."""


class ChatChoice(Described):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatReply(Generated):
    """Of POST /v1/chat/completions without `stream`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class LegacyLogprobs(Described):
    """Log probabilities of a completion's tokens, with `echo` those of the prompt first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Described):
    """One continuation."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionReply(Generated):
    """Of POST /v1/completions without `stream`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TokenizeReply(Described):
    """Of POST /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class DetokenizeReply(Described):
    """Of POST /detokenize."""

    prompt: str


class TokenizerInfo(Described):
    """Of GET /tokenizer_info."""

    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    chat_template: str | None


class ModelEntry(Described):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Described):
    """Of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelEntry]


class ClusterReply(Described):
    """Of GET /v1/cluster."""

    mode: Literal["speculative", "plain"]
    reason: str
    since_s: float
    routers: list[dict[str, Any]]
    verifiers: list[dict[str, Any]]
    drafters: list[dict[str, Any]]


class ServerInfo(Described):
    """Of GET /server_info."""

    model_path: str
    served_model_name: str
    max_model_len: int
    vocab_size: int
    internal_states: list[dict[str, float]]


class Health(Described):
    """Of the health endpoints."""

    status: str
