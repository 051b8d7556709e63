"""What a client wants its answer to look like: from the fields of a request to a grammar.

OpenAI's `response_format` and vLLM's `structured_outputs` say the same things. Strict like
schema.py: what is not honoured is refused, null means absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequestError
from cluster.grammar import GrammarError, GrammarKind, GrammarSpec, check_size
from cluster.grammar_check import GrammarChecker

_MAX_SCHEMA_DEPTH = 32
_MAX_CHOICES = 1000
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The grammar that a request asks for, and the field where it stands."""

    spec: GrammarSpec
    param: str


def structured_output(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None
) -> StructuredOutput | None:
    """What these fields ask for; None is any text. Bounds sizes and compiles nothing. Raises
    InvalidRequestError that names the field."""
    openai = None if response_format is None else _response_format(response_format)
    vllm = None if structured_outputs is None else _structured_outputs(structured_outputs)
    if openai and vllm:
        raise _invalid("structured_outputs", "cannot be combined with response_format")
    return openai or vllm


def check_compiles(output: StructuredOutput, checker: GrammarChecker) -> None:
    """Raise InvalidRequestError unless the grammar can be used. Blocks for as long as it takes to
    find out: milliseconds mostly, at worst the checker's budget."""
    try:
        checker.check(output.spec)
    except GrammarError as error:
        message = f"{output.param} cannot be used: {error}"
        raise InvalidRequestError(message, param=output.param) from None


# --- OpenAI -------------------------------------------------------------------------------------


def _response_format(field: Mapping[str, Any]) -> StructuredOutput | None:
    param = "response_format"
    kind = field.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise _invalid(f"{param}.type", "must be text, json_object or json_schema")
    given = _given(field, {"type", "json_schema"} if kind == "json_schema" else {"type"}, param)
    if kind == "json_object":
        return _output(GrammarKind.JSON_OBJECT, "", param)
    if kind == "json_schema":
        return _openai_schema(given.get("json_schema"), f"{param}.json_schema")
    return None


def _openai_schema(field: Any, param: str) -> StructuredOutput:
    if not isinstance(field, dict):
        raise _invalid(param, "must be an object")
    given = _given(field, {"name", "schema", "strict", "description"}, param)
    name = given.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _invalid(f"{param}.name", "must be 1 to 64 letters, digits, - and _")
    # What follows changes nothing: the schema always holds.
    if not isinstance(given.get("strict", True), bool):
        raise _invalid(f"{param}.strict", "must be a boolean")
    if not isinstance(given.get("description", ""), str):
        raise _invalid(f"{param}.description", "must be a string")
    return json_schema(given.get("schema"), f"{param}.schema")


# --- vLLM ---------------------------------------------------------------------------------------


def _structured_outputs(field: Mapping[str, Any]) -> StructuredOutput | None:
    param = "structured_outputs"
    given = _given(field, _READERS.keys(), param)
    if given.get("json_object") is False:
        del given["json_object"]
    if not given:
        return None
    if len(given) > 1:
        raise _invalid(param, f"must hold only one of {', '.join(given)}")
    [(key, value)] = given.items()
    return _READERS[key](value, f"{param}.{key}")


def _json(value: Any, param: str) -> StructuredOutput:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _invalid(param, f"is not valid JSON: {error}") from None
    return json_schema(value, param)


def _json_object(value: Any, param: str) -> StructuredOutput:
    if value is not True:
        raise _invalid(param, "must be a boolean")
    return _output(GrammarKind.JSON_OBJECT, "", param)


def _regex(value: Any, param: str) -> StructuredOutput:
    return _output(GrammarKind.REGEX, _text(value, param), param)


def _grammar(value: Any, param: str) -> StructuredOutput:
    return _output(GrammarKind.LARK, _text(value, param), param)


def _choice(value: Any, param: str) -> StructuredOutput:
    if not isinstance(value, list) or not value or not all(isinstance(c, str) for c in value):
        raise _invalid(param, "must be a list of strings")
    if len(value) > _MAX_CHOICES:
        raise _invalid(param, f"holds over {_MAX_CHOICES} choices")
    return _output(GrammarKind.CHOICE, json.dumps(value), param)


_READERS: Mapping[str, Callable[[Any, str], StructuredOutput]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "grammar": _grammar,
    "choice": _choice,
}


# --- parts of both ------------------------------------------------------------------------------


def _given(field: Mapping[str, Any], known: Iterable[str], param: str) -> dict[str, Any]:
    """The keys that say something."""
    given = {key: value for key, value in field.items() if value is not None}
    for key in given:
        if key not in known:
            raise _invalid(f"{param}.{key}", "is no field that this server knows here")
    return given


def json_schema(schema: Any, param: str) -> StructuredOutput:
    """A JSON Schema that stands at `param`. Bounds its size and compiles nothing."""
    if not isinstance(schema, dict):
        raise _invalid(param, "must be a JSON Schema, as an object")
    if "x-guidance" in schema:
        raise _invalid(f"{param}.x-guidance", "is no keyword that this server knows")
    _check_depth(schema, param)
    try:
        text = json.dumps(schema, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise _invalid(param, f"is not valid JSON: {error}") from None
    return _output(GrammarKind.JSON_SCHEMA, text, param)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise _invalid(param, "must be a string that is not empty")
    return value


def _output(kind: GrammarKind, text: str, param: str) -> StructuredOutput:
    spec = GrammarSpec(kind, text)
    try:
        check_size(spec)
    except GrammarError as error:
        raise _invalid(param, f"cannot be used: {error}") from None
    return StructuredOutput(spec, param)


def _check_depth(schema: Any, param: str) -> None:
    level = [schema]
    for _ in range(_MAX_SCHEMA_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise _invalid(param, f"is nested deeper than {_MAX_SCHEMA_DEPTH} levels")


def _children(value: Any) -> list[Any]:
    children = value.values() if isinstance(value, dict) else value
    return [child for child in children if isinstance(child, dict | list)]


def _invalid(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {message}", param=param)
