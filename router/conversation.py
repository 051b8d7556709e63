"""From the messages and tools of a chat request to a prompt, and to what may come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequestError
from cluster.grammar import GrammarError, GrammarSpec
from cluster.grammar_check import GrammarChecker
from router.chat import NOTHING, Message
from router.message_grammar import message_grammar
from router.message_reader import MessageForm
from router.schema import ChatCompletionRequest, ChatMessage, ToolCall
from router.served_model import ServedModel
from router.structured_output import StructuredOutput
from router.thinking import Thinking, thinking_after
from router.tools.call_format import HERMES, CallFormat, arguments_object
from router.tools.spelled_out import spelled_out
from router.tools.tool_use import ToolUse, loosened, tool_use, usable


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and what may follow it."""

    token_ids: tuple[int, ...]
    thinking: Thinking
    use: ToolUse | None
    """None if no function may be called."""
    call_format: CallFormat

    @property
    def form(self) -> MessageForm:
        """How the answer's text is to be read."""
        if self.use is None:
            return MessageForm(self.thinking)
        return MessageForm(self.thinking, self.call_format, self.use.names, self.use.named)


def conversation(
    model: ServedModel, request: ChatCompletionRequest, tool_call_format: str
) -> Conversation:
    """Render and tokenize. Raises InvalidRequestError naming the field."""
    use = tool_use(request)
    call_format = model.call_format(tool_call_format)
    if use is not None and call_format is None:
        raise InvalidRequestError(
            "how this model writes calls is not known; router.tool_call_format must say it",
            param="tools",
        )
    token_ids = prompt_ids(
        model,
        request.messages,
        call_format=call_format or HERMES,
        tools=use.shown if use is not None else (),
        variables=request.chat_template_kwargs or {},
    )
    thinking = thinking_after(token_ids, model.tokenizer)
    return Conversation(token_ids, thinking, use, call_format or HERMES)


def prompt_ids(
    model: ServedModel,
    messages: Sequence[ChatMessage],
    *,
    call_format: CallFormat,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] = NOTHING,
    add_generation_prompt: bool = True,
) -> tuple[int, ...]:
    """Token ids of a conversation, as ChatTemplate.encode gives them; without a template's help
    where it knows no tools. Raises InvalidRequestError naming the field."""
    rendered = template_messages(messages)
    if not model.template.renders_tools:
        rendered, tools = spelled_out(rendered, tools, call_format), ()
    return model.template.encode(
        rendered, tools=tools, variables=variables, add_generation_prompt=add_generation_prompt
    )


# --- messages -----------------------------------------------------------------------------------


def template_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Messages as chat templates expect them: content is a string, `developer` is `system`, the
    arguments of calls are objects, and a result names its function."""
    names: dict[str, str] = {}
    """By call, of the functions called so far."""
    rendered = []
    for index, message in enumerate(messages):
        rendered.append(_template_message(index, message, names))
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
    return rendered


def _template_message(index: int, message: ChatMessage, names: Mapping[str, str]) -> Message:
    text = message.text
    if text is None and (message.role != "assistant" or not _speaks(message)):
        raise _missing(f"messages[{index}].content")
    if message.role == "tool" and message.tool_call_id is None:
        raise _missing(f"messages[{index}].tool_call_id")
    role = "system" if message.role == "developer" else message.role
    rendered: Message = {"role": role, "content": text or ""}
    if message.tool_calls:
        rendered["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    for field in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, field)
        if value is not None:
            rendered[field] = value
    called = names.get(message.tool_call_id or "")
    if message.role == "tool" and called is not None:
        rendered.setdefault("name", called)
    return rendered


def _template_call(call: ToolCall) -> Message:
    arguments = arguments_object(call.function.arguments)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


def _speaks(message: ChatMessage) -> bool:
    """An assistant's turn without content holds something else."""
    return bool(message.tool_calls or message.refusal or message.reasoning_content)


def _missing(param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} is missing", param=param)


# --- the answer ---------------------------------------------------------------------------------


def answer_grammar(
    model: ServedModel, conversation: Conversation, output: StructuredOutput | None
) -> GrammarSpec | None:
    """The grammar of the whole answer, checked to be usable, which may take a second. `output`
    is what the client wants the content to look like. Raises InvalidRequestError."""
    use = conversation.use
    if output and use and not use.required and not conversation.call_format.marker:
        raise InvalidRequestError(
            f"{output.param} cannot be combined with tools for this model, whose calls look like "
            "any JSON; tool_choice none or required says what is wanted",
            param=output.param,
        )
    answer = output.spec if output else None
    complaint = ""
    for candidate in _ever_looser(use, model.grammar_checker):
        try:
            return _checked_grammar(model, conversation, answer, candidate)
        except GrammarError as error:
            complaint = str(error)
    param = "tools" if use or output is None else output.param
    raise InvalidRequestError(f"{param} cannot be used: {complaint}", param=param)


def _ever_looser(use: ToolUse | None, checker: GrammarChecker) -> Iterator[ToolUse | None]:
    """First as the client has it, then without the schemas that cannot be used, then, if all of
    them are too much together, without any that is not strict."""
    yield use
    if use is not None:
        yield usable(use, checker)
        yield loosened(use)


def _checked_grammar(
    model: ServedModel, conversation: Conversation, answer: GrammarSpec | None, use: ToolUse | None
) -> GrammarSpec | None:
    spec = message_grammar(
        answer,
        use,
        conversation.call_format,
        conversation.thinking,
        model.tokenizer.special_ids,
    )
    if spec is not None:
        model.grammar_checker.check(spec)
    return spec
