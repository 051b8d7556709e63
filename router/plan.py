"""From a valid request body to what is to be generated; limits are checked here, before anything
is allocated for a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config import LimitsConfig
from cluster.errors import InvalidRequestError, ModelNotFoundError
from cluster.grammar import GrammarSpec
from cluster.grammar_check import GrammarChecker
from cluster.protocol.codec import check_token_ids
from cluster.types import ModelCard, SamplingParams
from router.chat import ChatTemplate, Message
from router.path_policy import SpeculationMode
from router.schema import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    SamplingFields,
    TokenizeRequest,
)
from router.structured_output import check_compiles, structured_output
from router.tokenizer import Tokenizer

LEGACY_MAX_TOKENS = 16
"""What /v1/completions generates where the client names no limit."""


class ServedModel:
    """The target as the router needs it."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.tokenizer = Tokenizer(card)
        self.template = ChatTemplate(card, self.tokenizer)
        self.grammar_checker = GrammarChecker(card.tokenizer_json, card.vocab_size)

    def check_name(self, name: str | None) -> None:
        """Raise ModelNotFoundError unless this is the model that `name` means."""
        if name is not None and name != self.card.name:
            raise ModelNotFoundError(
                f"the model {name!r} is not served here; {self.card.name!r} is",
                param="model",
                code="model_not_found",
            )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request."""

    token_ids: tuple[int, ...]
    max_tokens: int
    """Most tokens to generate after it."""
    echo: str = ""
    """Text to give back before the completion."""


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What one request generates: `num_choices` for each prompt."""

    prompts: tuple[Prompt, ...]
    num_choices: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    stop_token_ids: frozenset[int]
    """End a generation besides the model's own end-of-sequence ids."""
    ignore_eos: bool
    seed: int | None
    mode: SpeculationMode
    num_speculative_tokens: int
    drafter: str
    cache_salt: str
    num_top_logprobs: int | None
    """None tells no log probabilities."""
    grammar: GrammarSpec | None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)


def num_generations(request: SamplingFields, limits: LimitsConfig) -> int:
    """How many generations a request asks for. Needs no tokenizer, so that admission can be asked
    first; raises InvalidRequestError if it is over the limits."""
    num_prompts = len(_prompts(request)) if isinstance(request, CompletionRequest) else 1
    if num_prompts > limits.max_prompts:
        raise InvalidRequestError(
            f"{num_prompts} prompts are over the limit of {limits.max_prompts}", param="prompt"
        )
    num_choices = request.n or 1
    if num_choices > limits.max_choices:
        raise InvalidRequestError(f"n is over the limit of {limits.max_choices} choices", param="n")
    return num_prompts * num_choices


def plan_chat(
    model: ServedModel, limits: LimitsConfig, request: ChatCompletionRequest
) -> GenerationPlan:
    """Plan of a chat completion."""
    _check_fields(request, limits)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    token_ids = model.template.encode(template_messages(request.messages))
    room = _room(model, limits, token_ids, "messages")
    prompt = Prompt(token_ids, _max_tokens(request, limits, room, default=room))
    return _plan(model, request, (prompt,))


def plan_completion(
    model: ServedModel, limits: LimitsConfig, request: CompletionRequest
) -> GenerationPlan:
    """Plan of a completion."""
    _check_fields(request, limits)
    if request.echo and request.logprobs is not None:
        raise InvalidRequestError(
            "logprobs together with echo, of the prompt's tokens, is not supported yet",
            param="logprobs",
        )
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequestError("best_of other than n is not supported yet", param="best_of")
    prompts = tuple(
        _completion_prompt(model, limits, request, prompt) for prompt in _prompts(request)
    )
    return _plan(model, request, prompts)


def tokenize(model: ServedModel, request: TokenizeRequest) -> tuple[int, ...]:
    """Ids of what /tokenize asks for."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    if request.messages is not None:
        return model.template.encode(
            template_messages(request.messages),
            add_generation_prompt=request.add_generation_prompt is not False,
        )
    return model.tokenizer.encode(
        request.prompt or "", add_special_tokens=request.add_special_tokens is not False
    )


def template_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Messages as chat templates expect them: content is a string, `developer` is `system`."""
    return [_template_message(index, message) for index, message in enumerate(messages)]


def _template_message(index: int, message: ChatMessage) -> Message:
    text = message.text
    if text is None and (message.role != "assistant" or not _speaks(message)):
        raise InvalidRequestError(
            f"messages[{index}].content is missing", param=f"messages[{index}].content"
        )
    role = "system" if message.role == "developer" else message.role
    rendered: Message = {"role": role, "content": text or ""}
    if message.tool_calls:
        rendered["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    for field in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, field)
        if value is not None:
            rendered[field] = value
    return rendered


def _speaks(message: ChatMessage) -> bool:
    """An assistant's turn without content holds something else."""
    return bool(message.tool_calls or message.refusal or message.reasoning_content)


# --- checks -------------------------------------------------------------------------------------


def _check_fields(request: SamplingFields, limits: LimitsConfig) -> None:
    for stop in request.stops:
        if len(stop) > limits.max_stop_len:
            raise InvalidRequestError(
                f"a stop string is over the limit of {limits.max_stop_len} characters",
                param="stop",
            )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
    if request.speculation and request.speculation.drafter in ("suffix", "prediction"):
        raise InvalidRequestError(
            f"the drafter {request.speculation.drafter} is not supported yet",
            param="speculation.drafter",
        )


def _room(model: ServedModel, limits: LimitsConfig, token_ids: Sequence[int], param: str) -> int:
    """Tokens that the window leaves after a prompt, at least one."""
    window = model.card.max_model_len
    most = min(limits.max_prompt_tokens or window, window - 1)
    if not token_ids:
        raise InvalidRequestError(f"{param} holds no tokens", param=param)
    if len(token_ids) > most:
        raise InvalidRequestError(
            f"the prompt has {len(token_ids)} tokens, over the limit of {most} (the model's "
            f"context is {window} tokens, prompt and completion together)",
            param=param,
            code="context_length_exceeded",
        )
    return window - len(token_ids)


def _max_tokens(request: SamplingFields, limits: LimitsConfig, room: int, default: int) -> int:
    """Most tokens to generate."""
    most = min(limits.max_completion_tokens or room, room)
    asked = request.max_completion_tokens or request.max_tokens
    param = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
    if request.max_tokens and request.max_completion_tokens not in (None, request.max_tokens):
        raise InvalidRequestError("max_completion_tokens differs from max_tokens", param=param)
    if asked is not None and asked > most:
        raise InvalidRequestError(
            f"{param} is {asked}, over the {most} tokens that are left for the completion",
            param=param,
        )
    if request.min_tokens and request.min_tokens > (asked or most):
        raise InvalidRequestError("min_tokens is over max_tokens", param="min_tokens")
    return asked or min(default, most)


# --- parts of a plan ----------------------------------------------------------------------------


def _prompts(request: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompt field's four forms as a list."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def _completion_prompt(
    model: ServedModel, limits: LimitsConfig, request: CompletionRequest, prompt: str | list[int]
) -> Prompt:
    if isinstance(prompt, str):
        token_ids = model.tokenizer.encode(prompt, add_special_tokens=True)
        echo = prompt
    else:
        token_ids = tuple(prompt)
        check_token_ids(token_ids, model.card.vocab_size, "prompt")
        echo = model.tokenizer.decode(token_ids) if request.echo else ""
    room = _room(model, limits, token_ids, "prompt")
    max_tokens = _max_tokens(request, limits, room, default=LEGACY_MAX_TOKENS)
    return Prompt(token_ids, max_tokens, echo if request.echo else "")


def _plan(
    model: ServedModel, request: SamplingFields, prompts: tuple[Prompt, ...]
) -> GenerationPlan:
    speculation = request.speculation
    stop_ids = tuple(request.stop_token_ids or ())
    check_token_ids(stop_ids, model.card.vocab_size, "stop_token_ids")
    # A special token has no text, so as a stop string it could never be found.
    special_ids = model.tokenizer.special_ids
    stop_ids += tuple(special_ids[stop] for stop in request.stops if stop in special_ids)
    return GenerationPlan(
        prompts=prompts,
        num_choices=request.n or 1,
        sampling=_sampling(model, request),
        stops=request.stops,
        stop_token_ids=frozenset(stop_ids),
        ignore_eos=bool(request.ignore_eos),
        seed=request.seed,
        mode=SpeculationMode(speculation.mode or "auto" if speculation else "auto"),
        num_speculative_tokens=(speculation and speculation.num_speculative_tokens) or 0,
        drafter=(speculation and speculation.drafter) or "auto",
        cache_salt=request.cache_salt or "",
        num_top_logprobs=_num_top_logprobs(request),
        grammar=_grammar(model, request),
    )


def _sampling(model: ServedModel, request: SamplingFields) -> SamplingParams:
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=max(request.top_k or 0, 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        logit_bias=_logit_bias(model, request.logit_bias or {}),
        bad_words=_bad_words(model, request.bad_words or ()),
        min_tokens=request.min_tokens or 0,
    )


def _grammar(model: ServedModel, request: SamplingFields) -> GrammarSpec | None:
    """Checked to be usable, which may take a second."""
    output = structured_output(request.response_format, request.structured_outputs)
    if output is None:
        return None
    if request.ignore_eos:
        raise InvalidRequestError(
            f"ignore_eos cannot be combined with {output.param}: nothing follows its end",
            param="ignore_eos",
        )
    check_compiles(output, model.grammar_checker)
    return output.spec


def _num_top_logprobs(request: SamplingFields) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if isinstance(request, ChatCompletionRequest) and request.logprobs:
        return request.top_logprobs or 0
    return None


def _logit_bias(model: ServedModel, bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Sorted by token, each once: "7" and "07" are one."""
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or int(key) in by_id:
            raise InvalidRequestError(
                f"logit_bias: {key[:20]!r} is no token id, or one that is there twice",
                param="logit_bias",
            )
        by_id[int(key)] = value
    check_token_ids(tuple(by_id), model.card.vocab_size, "logit_bias")
    return tuple(sorted(by_id.items()))


def _bad_words(model: ServedModel, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Tokens of each word as it stands at the start of a text and after a space, as vLLM has it."""
    sequences = {
        model.tokenizer.encode(f"{space}{word.lstrip()}", add_special_tokens=False)
        for word in words
        for space in ("", " ")
    }
    if () in sequences:
        raise InvalidRequestError("bad_words holds a word without tokens", param="bad_words")
    return tuple(sorted(sequences))
