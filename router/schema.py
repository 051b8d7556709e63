"""What clients may send. Strict: no coercion, no unknown fields.

A field is honoured, or changes nothing here whatever its value, or is listed in NOT_YET and then
only its neutral value is taken. Null means absent for every optional field. What depends on the
model or on configured limits is checked in plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.errors import InvalidRequestError

Finite = {"allow_inf_nan": False}
FAIL_FAST = Field(fail_fast=True)
"""The first wrong element is complaint enough, however long the list."""
DEPRECATED = Field(json_schema_extra={"deprecated": True})
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
ChatTemplateKwargs = Annotated[dict[str, bool | int | str], Field(max_length=16)]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]


class Schema(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(
        strict=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True
    )


class SpeculationOptions(Schema):
    """Paceline's own: how this request uses drafts. They never change what is generated."""

    mode: Literal["auto", "on", "off"] | None = None
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64)] | None = None
    """Most drafts verified in one step."""
    drafter: Literal["auto", "model", "ngram", "suffix", "prediction"] | None = None
    trace: bool | None = None
    """Tell for each chunk how many of its tokens were accepted drafts."""


class StreamOptions(Schema):
    """Only together with `stream`."""

    include_usage: bool | None = None
    """One more chunk at the end, with usage and without choices."""
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk."""
    include_obfuscation: Literal[False] | None = None


class TextPart(Schema):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Prediction(Schema):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], FAIL_FAST]

    @property
    def text(self) -> str:
        """Content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content


class ToolCallFunction(Schema):
    """Function and arguments of a call in the conversation so far."""

    name: str
    arguments: str


class ToolCall(Schema):
    """A call in the conversation so far."""

    id: str
    type: Literal["function"]
    function: ToolCallFunction


class ChatMessage(Schema):
    """One turn. Replies of this server can be sent back as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    type: Literal["text", "message"] | None = None
    """Changes nothing; lm-eval sends it."""
    content: str | Annotated[list[TextPart], FAIL_FAST] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], FAIL_FAST] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str | None:
        """Content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(Schema):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments, of an object; none means that it takes none."""
    strict: bool | None = None
    """Arguments follow the schema in any case. Strict refuses a schema that is not supported,
    else any object will do for it."""


class Tool(Schema):
    """Something that the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(Schema):
    """One of the functions in `tools`."""

    name: str


class NamedTool(Schema):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionReference


class AllowedTools(Schema):
    """Some of `tools`."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], FAIL_FAST, Field(min_length=1, max_length=128)]


class AllowedToolsChoice(Schema):
    """The model sees all tools and may call some."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class SamplingFields(Schema):
    """What both generation endpoints take."""

    model: str
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    """Another name of max_tokens."""
    temperature: Annotated[float, Field(ge=0, le=2, **Finite)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, **Finite)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    """0 and -1 are off."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2, **Finite)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, **Finite)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, **Finite)] | None = None
    """Of prompt and completion; 1 is off."""
    min_p: Annotated[float, Field(ge=0, le=1, **Finite)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100, **Finite)]], Field(max_length=1024)
        ]
        | None
    ) = None
    """By token id, written as a string."""
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1)]], FAIL_FAST, Field(max_length=64)] | None
    ) = None
    """Texts that are never completed, at the start of a word or within one."""
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """Nothing ends the generation before: no end-of-sequence, no stop."""
    n: Annotated[int, Field(ge=1)] | None = None
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], FAIL_FAST, Field(max_length=4)]
        | None
    ) = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], FAIL_FAST, Field(max_length=64)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """As vLLM has it: only requests with the same salt reuse one another's work on the prompt, so
    that nobody learns from the time of an answer what others asked. It changes no token."""
    speculation: SpeculationOptions | None = None
    prediction: Prediction | None = None
    """What the answer will be, for the most part: the file to be edited, say. It is drafted from,
    and changes no token."""

    # Nothing here depends on these.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    service_tier: Literal["auto", "default", "priority", "flex"] | None = None
    """Under load flex goes plain first and priority last; no token depends on it."""
    priority: Priority | None = None
    """As vLLM has it: the verifier's queue is left by the lowest first."""

    response_format: dict[str, Any] | None = None
    """text, json_object or json_schema; see structured_output.py."""
    structured_outputs: dict[str, Any] | None = None
    """As vLLM has it: one of json, json_object, regex, choice, grammar."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar may have to be checked."""
        return self.response_format is not None or self.structured_outputs is not None

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def trace(self) -> bool:
        return bool(self.speculation and self.speculation.trace)


class ChatCompletionRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FAIL_FAST, Field(min_length=1)]
    logprobs: bool | None = None
    """Of the model's own distribution: before penalties, temperature and truncation."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Only together with `logprobs`."""
    tools: Annotated[list[Tool], FAIL_FAST, Field(max_length=128)] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None = None
    """auto where there are tools: text, calls, or text and then calls."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may hold several calls; true by default."""
    functions: Annotated[Any, DEPRECATED] = None
    """Refused: use `tools`."""
    function_call: Annotated[Any, DEPRECATED] = None
    """Refused: use `tool_choice`."""
    chat_template_kwargs: ChatTemplateKwargs | None = None
    """More variables for the model's chat template, as vLLM has it: enable_thinking, say."""

    @property
    def is_constrained(self) -> bool:
        """Calls follow a grammar."""
        return bool(self.tools) or super().is_constrained


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], FAIL_FAST, Field(min_length=1)]
        | Annotated[list[TokenId], FAIL_FAST, Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], FAIL_FAST, Field(min_length=1)]],
            FAIL_FAST,
            Field(min_length=1),
        ]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """0 only together with `echo`: then nothing is generated."""
    echo: bool | None = None
    """Give the prompt back before the completion, with `logprobs` those of its tokens too."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """So many of the likeliest tokens beside each token's own, of the model's own distribution."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: str | None = None


class TokenizeRequest(Schema):
    """Body of POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], FAIL_FAST, Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """By default true for a prompt; the chat template brings its own."""
    add_generation_prompt: bool | None = None
    tools: Annotated[list[Tool], FAIL_FAST, Field(max_length=128)] | None = None
    """That a chat completion would tell the model of; only together with `messages`."""
    chat_template_kwargs: ChatTemplateKwargs | None = None
    """The same."""
    return_token_strs: bool | None = None


class DetokenizeRequest(Schema):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], FAIL_FAST]


# --- fields whose effect does not exist yet -----------------------------------------------------


def _empty(value: Any) -> bool:
    return not value


NOT_YET: Mapping[str, Callable[[Any], bool]] = {
    "suffix": _empty,
}
"""Field to: is this value without effect? Others are refused, never ignored."""


Parsed = TypeVar("Parsed", bound=Schema)


def parse(schema: type[Parsed], body: Mapping[str, Any]) -> Parsed:
    """The request that a JSON object holds. Raises InvalidRequestError naming the field."""
    try:
        request = schema.model_validate(body)
    except ValidationError as error:
        raise _invalid(error, body) from None
    _check_not_yet(request)
    return request


REPLACED: Mapping[str, str] = {"functions": "tools", "function_call": "tool_choice"}
"""Field that OpenAI had once to the one that it has now."""


def _check_not_yet(request: Schema) -> None:
    for name in request.model_fields_set & REPLACED.keys():
        if getattr(request, name) is not None:
            raise InvalidRequestError(f"{name} is not taken; use {REPLACED[name]}", param=name)
    for name in request.model_fields_set & NOT_YET.keys():
        value = getattr(request, name)
        if value is not None and not NOT_YET[name](value):
            raise InvalidRequestError(f"{name} is not supported yet", param=name)


def _invalid(error: ValidationError, body: Mapping[str, Any]) -> InvalidRequestError:
    """The complaint from deepest and farthest in: of a union's arms, the one that fitted best."""
    complaints = [(_path(item["loc"], item["type"], body), item) for item in error.errors()]
    path, item = max(complaints, key=lambda complaint: _depth(complaint[0]))
    param = _param(path)
    if item["type"] == "extra_forbidden":
        return InvalidRequestError(f"{param} is no field that this server knows", param=param)
    return InvalidRequestError(f"{param}: {item['msg']}", param=param)


def _depth(path: Sequence[int | str]) -> tuple[int, list[int]]:
    return len(path), [step for step in path if isinstance(step, int)]


def _path(loc: Sequence[int | str], kind: str, body: Any) -> list[int | str]:
    """`loc` without what names an arm of a union instead of a place in the body."""
    path: list[int | str] = []
    for index, step in enumerate(loc, start=1):
        is_missing = kind == "missing" and index == len(loc)
        if isinstance(body, Mapping) and (step in body or is_missing):
            path.append(step)
            body = body.get(step)
        elif isinstance(body, list) and isinstance(step, int) and step < len(body):
            path.append(step)
            body = body[step]
    return path


def _param(path: Sequence[int | str]) -> str:
    """As OpenAI writes it: messages[0].content."""
    written = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return written.removeprefix(".")
