"""From a valid request body to what is to be generated; limits are checked here, before anything
is allocated for a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config import LimitsConfig
from cluster.errors import InvalidRequestError
from cluster.grammar import GrammarSpec
from cluster.protocol.codec import check_token_ids
from cluster.types import SamplingParams
from router.conversation import Conversation, answer_grammar, conversation, prompt_ids
from router.message_reader import PLAIN, MessageForm
from router.path_policy import ServiceTier, SpeculationMode
from router.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingFields,
    TokenizeRequest,
)
from router.served_model import ServedModel
from router.structured_output import check_compiles, structured_output
from router.tools.call_format import HERMES
from router.tools.tool_use import shown

LEGACY_MAX_TOKENS = 16
"""What /v1/completions generates where the client names no limit."""
_TIERS = {"flex": ServiceTier.FLEX, "priority": ServiceTier.PRIORITY}
"""By `service_tier`; the others are the default."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request."""

    token_ids: tuple[int, ...]
    max_tokens: int
    """Most tokens to generate after it."""
    echo: str = ""
    """Text to give back before the completion."""
    prediction_ids: tuple[int, ...] = ()
    """What the client says the completion will be, if it may be drafted from."""


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
    tier: ServiceTier
    priority: int
    """As in GenerationRequest."""
    num_top_logprobs: int | None
    """None tells no log probabilities."""
    num_prompt_logprobs: int | None
    """The same for the prompts' tokens."""
    grammar: GrammarSpec | None
    form: MessageForm
    """How the generated text is to be read."""

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
    model: ServedModel,
    limits: LimitsConfig,
    request: ChatCompletionRequest,
    tool_call_format: str = "auto",
) -> GenerationPlan:
    """Plan of a chat completion."""
    _check_fields(request, limits)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    talk = conversation(model, request, tool_call_format)
    token_ids = talk.token_ids
    room = _room(model, limits, token_ids, "messages")
    prompt = Prompt(
        token_ids,
        _max_tokens(request, limits, room, default=room),
        prediction_ids=_prediction_ids(model, request, token_ids),
    )
    return _plan(model, request, (prompt,), talk)


def plan_completion(
    model: ServedModel, limits: LimitsConfig, request: CompletionRequest
) -> GenerationPlan:
    """Plan of a completion."""
    _check_fields(request, limits)
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequestError(
            "max_tokens: 0 generates nothing; it is of use only together with echo: true",
            param="max_tokens",
        )
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequestError("best_of other than n is not supported yet", param="best_of")
    prompts = tuple(
        _completion_prompt(model, limits, request, prompt) for prompt in _prompts(request)
    )
    plan = _plan(model, request, prompts)
    _check_prompt_logprobs(plan, limits)
    return plan


def tokenize(
    model: ServedModel, request: TokenizeRequest, tool_call_format: str = "auto"
) -> tuple[int, ...]:
    """Ids of what /tokenize asks for."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    if request.messages is not None:
        return prompt_ids(
            model,
            request.messages,
            call_format=model.call_format(tool_call_format) or HERMES,
            tools=shown(request.tools or ()),
            variables=request.chat_template_kwargs or {},
            add_generation_prompt=request.add_generation_prompt is not False,
        )
    for param in ("tools", "chat_template_kwargs"):
        if getattr(request, param):
            raise InvalidRequestError(f"{param} needs messages", param=param)
    return model.tokenizer.encode(
        request.prompt or "", add_special_tokens=request.add_special_tokens is not False
    )


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


def _check_prompt_logprobs(plan: GenerationPlan, limits: LimitsConfig) -> None:
    if plan.num_prompt_logprobs is None:
        return
    count = plan.num_prompt_tokens * plan.num_choices * (1 + plan.num_prompt_logprobs)
    if count > limits.max_prompt_logprobs:
        raise InvalidRequestError(
            f"echo with logprobs asks for {count} log probabilities of prompt tokens, over the "
            f"limit of {limits.max_prompt_logprobs}; send fewer prompts at once",
            param="logprobs",
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
    if request.max_tokens is not None and request.max_completion_tokens not in (
        None,
        request.max_tokens,
    ):
        raise InvalidRequestError("max_completion_tokens differs from max_tokens", param=param)
    if asked is not None and asked > most:
        raise InvalidRequestError(
            f"{param} is {asked}, over the {most} tokens that are left for the completion",
            param=param,
        )
    if request.min_tokens and request.min_tokens > (most if asked is None else asked):
        raise InvalidRequestError("min_tokens is over max_tokens", param="min_tokens")
    return min(default, most) if asked is None else asked


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
    return Prompt(
        token_ids,
        max_tokens,
        echo if request.echo else "",
        _prediction_ids(model, request, token_ids),
    )


def _prediction_ids(
    model: ServedModel, request: SamplingFields, prompt_ids: tuple[int, ...]
) -> tuple[int, ...]:
    """The prediction as the model would write it behind this prompt."""
    if request.prediction is None:
        return ()
    token_ids = model.tokenizer.encode_continuation(prompt_ids, request.prediction.text)
    if len(token_ids) > model.card.max_model_len:
        raise InvalidRequestError(
            f"the prediction has {len(token_ids)} tokens, over the {model.card.max_model_len} of "
            "the model's context",
            param="prediction.content",
        )
    speculation = request.speculation
    wanted = speculation is None or (
        speculation.mode != "off" and speculation.drafter in (None, "auto", "prediction")
    )
    return token_ids if wanted else ()


def _plan(
    model: ServedModel,
    request: SamplingFields,
    prompts: tuple[Prompt, ...],
    talk: Conversation | None = None,
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
        tier=_TIERS.get(request.service_tier or "", ServiceTier.DEFAULT),
        priority=request.priority or 0,
        num_top_logprobs=_num_top_logprobs(request),
        num_prompt_logprobs=_num_prompt_logprobs(request),
        grammar=_grammar(model, request, talk),
        form=talk.form if talk else PLAIN,
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


def _grammar(
    model: ServedModel, request: SamplingFields, talk: Conversation | None
) -> GrammarSpec | None:
    """Checked to be usable, which may take a second."""
    output = structured_output(request.response_format, request.structured_outputs)
    has_calls = talk is not None and talk.use is not None
    if output is None and not has_calls:
        return None
    if request.ignore_eos:
        raise InvalidRequestError(
            f"ignore_eos cannot be combined with {output.param if output else 'tools'}: nothing "
            "follows its end",
            param="ignore_eos",
        )
    if output is not None:
        check_compiles(output, model.grammar_checker)
    if talk is None:
        return output.spec if output else None
    return answer_grammar(model, talk, output)


def _num_prompt_logprobs(request: SamplingFields) -> int | None:
    return request.logprobs if isinstance(request, CompletionRequest) and request.echo else None


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
