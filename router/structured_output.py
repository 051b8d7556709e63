"""What a client wants its answer to look like: from the fields of a request to a grammar.

OpenAI's `response_format` and vLLM's `structured_outputs` say the same things. Strict like schema.py:
what is not honoured is refused, null means absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequestError
from cluster.grammar import MAX_GRAMMAR_BYTES, GrammarError, GrammarKind, GrammarSpec
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
    """What these fields ask for; None is any text. Bounds sizes and compiles nothing; raises
    InvalidRequestError that names the field."""
    asked = [
        output
        for output in (
            _response_format(response_format or {"type": "text"}),
            _structured_outputs(structured_outputs or {}),
        )
        if output is not None
    ]
    if len(asked) == 2:
        raise _invalid("give either response_format or structured_outputs", "structured_outputs")
    return asked[0] if asked else None


def check_compiles(output: StructuredOutput, checker: GrammarChecker) -> None:
    """Raise InvalidRequestError unless the grammar can be used. Blocks for as long as it takes to
    find out, mostly milliseconds and at worst the checker's budget."""
    try:
        checker.check(output.spec)
    except GrammarError as error:
        raise _invalid(str(error), output.param) from None


# --- OpenAI -------------------------------------------------------------------------------------


def _response_format(field: Mapping[str, Any]) -> StructuredOutput | None:
    param = "response_format"
    kind = field.get("type")
    if kind == "json_schema":
        _check_keys(field, {"type", "json_schema"}, param)
        return _openai_schema(field.get("json_schema"), f"{param}.json_schema")
    _check_keys(field, {"type"}, param)
    if kind == "json_object":
        return StructuredOutput(GrammarSpec(GrammarKind.JSON_OBJECT), param)
    if kind != "text":
        raise _invalid("must be text, json_object or json_schema", f"{param}.type")
    return None


def _openai_schema(field: Any, param: str) -> StructuredOutput:
    if not isinstance(field, dict):
        raise _invalid("must be an object", param)
    _check_keys(field, {"name", "schema", "strict", "description"}, param)
    name = field.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _invalid("must be 1 to 64 letters, digits, - and _", f"{param}.name")
    # The schema always holds, so `strict` changes nothing.
    for key, kind in (("strict", bool), ("description", str)):
        if not isinstance(field.get(key), kind | None):
            raise _invalid(f"must be of type {kind.__name__}", f"{param}.{key}")
    return _schema(field.get("schema"), f"{param}.schema")


# --- vLLM ---------------------------------------------------------------------------------------


def _structured_outputs(field: Mapping[str, Any]) -> StructuredOutput | None:
    param = "structured_outputs"
    _check_keys(field, {*_VLLM, "json_object"}, param)
    given = [key for key, value in field.items() if value is not None and value is not False]
    if not given:
        return None
    if len(given) > 1:
        raise _invalid(f"give only one of {', '.join(given)}", param)
    [key] = given
    param = f"{param}.{key}"
    if key != "json_object":
        return _VLLM[key](field[key], param)
    if field[key] is not True:
        raise _invalid("must be a boolean", param)
    return StructuredOutput(GrammarSpec(GrammarKind.JSON_OBJECT), param)


def _json(field: Any, param: str) -> StructuredOutput:
    if isinstance(field, str):
        try:
            field = json.loads(_bounded(field, param))
        except (ValueError, RecursionError) as error:
            raise _invalid(f"is not valid JSON: {error}", param) from None
    return _schema(field, param)


def _regex(field: Any, param: str) -> StructuredOutput:
    return _text(GrammarKind.REGEX, field, param)


def _grammar(field: Any, param: str) -> StructuredOutput:
    return _text(GrammarKind.LARK, field, param)


def _choice(field: Any, param: str) -> StructuredOutput:
    if not isinstance(field, list) or not field or not all(isinstance(c, str) for c in field):
        raise _invalid("must be a list of strings", param)
    if len(field) > _MAX_CHOICES:
        raise _invalid(f"has over {_MAX_CHOICES} choices", param)
    text = _bounded(json.dumps(field), param)
    return StructuredOutput(GrammarSpec(GrammarKind.CHOICE, text), param)


_VLLM: Mapping[str, Callable[[Any, str], StructuredOutput]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}


# --- parts of both ------------------------------------------------------------------------------


def _schema(schema: Any, param: str) -> StructuredOutput:
    if not isinstance(schema, dict):
        raise _invalid("must be a JSON Schema, an object", param)
    if "x-guidance" in schema:
        raise _invalid("is no keyword that this server knows", f"{param}.x-guidance")
    _check_depth(schema, param)
    try:
        text = json.dumps(schema, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise _invalid(f"is not valid JSON: {error}", param) from None
    return StructuredOutput(GrammarSpec(GrammarKind.JSON_SCHEMA, _bounded(text, param)), param)


def _text(kind: GrammarKind, text: Any, param: str) -> StructuredOutput:
    if not isinstance(text, str) or not text:
        raise _invalid("must be a string, and not empty", param)
    return StructuredOutput(GrammarSpec(kind, _bounded(text, param)), param)


def _bounded(text: str, param: str) -> str:
    if len(text.encode("utf-8", "replace")) > MAX_GRAMMAR_BYTES:
        raise _invalid(f"is over the limit of {MAX_GRAMMAR_BYTES} bytes", param)
    return text


def _check_depth(schema: Any, param: str) -> None:
    level = [schema]
    for _ in range(_MAX_SCHEMA_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise _invalid(f"is nested deeper than {_MAX_SCHEMA_DEPTH} levels", param)


def _children(value: Any) -> list[Any]:
    children = value.values() if isinstance(value, dict) else value
    return [child for child in children if isinstance(child, dict | list)]


def _check_keys(field: Mapping[str, Any], known: set[str], param: str) -> None:
    for key in field:
        if key not in known:
            raise _invalid("is no field that this server knows", f"{param}.{key}")


def _invalid(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {message}", param=param)
