"""What a request lets the model call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.errors import InvalidRequestError
from cluster.grammar import GrammarError, GrammarKind, GrammarSpec
from cluster.grammar_check import GrammarChecker
from router.schema import AllowedToolsChoice, ChatCompletionRequest, NamedTool, Tool
from router.structured_output import json_schema

MAX_CALLS = 64
"""In one answer, so that a model cannot go on for ever with calls."""
_NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_ANY_OBJECT = GrammarSpec(GrammarKind.JSON_OBJECT)


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called."""

    name: str
    arguments: GrammarSpec
    """What they must look like."""
    strict: bool
    param: str
    """Where it stands in the request."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which calls an answer may or must hold."""

    shown: tuple[Mapping[str, Any], ...]
    """The tools as the prompt tells the model of them, called or not."""
    functions: tuple[Function, ...]
    required: bool
    named: bool
    """The client chose the function."""
    max_calls: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(function.name for function in self.functions)


def tool_use(request: ChatCompletionRequest) -> ToolUse | None:
    """What a request says of tools; None if the model shall know of none. Compiles nothing. Raises
    InvalidRequestError that names the field."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise _invalid("tool_choice", "needs tools")
        return None
    functions = _functions(request.tools)
    if choice == "none":
        return None
    named = isinstance(choice, NamedTool)
    several = request.parallel_tool_calls is not False and not named
    return ToolUse(
        shown=shown(request.tools),
        functions=_allowed(functions, choice),
        required=_is_required(choice),
        named=named,
        max_calls=MAX_CALLS if several else 1,
    )


def shown(tools: Sequence[Tool]) -> tuple[Mapping[str, Any], ...]:
    """Tools as the prompt tells the model of them."""
    return tuple(tool.model_dump(exclude_none=True) for tool in tools)


def usable(use: ToolUse, checker: GrammarChecker) -> ToolUse:
    """With any object for the arguments where a schema is not strict and cannot be used. Raises
    InvalidRequestError for a strict one. Blocks while the checker tries them."""
    return replace(
        use, functions=tuple(_usable_function(function, checker) for function in use.functions)
    )


def loosened(use: ToolUse) -> ToolUse:
    """With any object for the arguments of functions that are not strict."""
    return replace(use, functions=tuple(map(_loose, use.functions)))


def _usable_function(function: Function, checker: GrammarChecker) -> Function:
    try:
        checker.check(function.arguments)
    except GrammarError as error:
        if function.strict:
            raise _invalid(function.param, f"cannot be used: {error}") from None
        return _loose(function)
    return function


def _loose(function: Function) -> Function:
    return function if function.strict else replace(function, arguments=_ANY_OBJECT)


def _functions(tools: list[Tool]) -> dict[str, Function]:
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        param = f"tools[{index}].function"
        name = tool.function.name
        if name in functions:
            raise _invalid(f"{param}.name", f"is there twice: {name}")
        functions[name] = _function(tool, param)
    return functions


def _function(tool: Tool, param: str) -> Function:
    param = f"{param}.parameters"
    schema = _NO_ARGUMENTS if tool.function.parameters is None else tool.function.parameters
    if schema.get("type", "object") != "object":
        raise _invalid(f"{param}.type", "must be object")
    spec = json_schema({"type": "object", **schema}, param).spec
    return Function(tool.function.name, spec, bool(tool.function.strict), param)


def _allowed(functions: Mapping[str, Function], choice: object) -> tuple[Function, ...]:
    if isinstance(choice, NamedTool):
        return (_find(functions, choice, "tool_choice"),)
    if isinstance(choice, AllowedToolsChoice):
        found = {
            reference.function.name: _find(
                functions, reference, f"tool_choice.allowed_tools.tools[{index}]"
            )
            for index, reference in enumerate(choice.allowed_tools.tools)
        }
        return tuple(found.values())
    return tuple(functions.values())


def _find(functions: Mapping[str, Function], reference: NamedTool, param: str) -> Function:
    name = reference.function.name
    if name not in functions:
        raise _invalid(f"{param}.function.name", f"is none of the tools: {name[:64]}")
    return functions[name]


def _is_required(choice: object) -> bool:
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)


def _invalid(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {message}", param=param)
