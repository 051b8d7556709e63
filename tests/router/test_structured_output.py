"""From the fields of a request to a grammar; what is wrong is refused by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.errors import InvalidRequestError
from cluster.grammar import MAX_GRAMMAR_BYTES, GrammarKind, GrammarSpec
from cluster.grammar_check import GrammarChecker
from router.structured_output import StructuredOutput, check_compiles, structured_output
from tests.support.hostile_grammars import REFUSED
from tests.support.json_schemas import random_schema

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["b"]}
NO_TEXT = GrammarSpec(GrammarKind.JSON_OBJECT)


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker('{"added_tokens": []}', vocab_size=100)
    yield checker
    checker.close()


def openai(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def spec(output: StructuredOutput | None) -> GrammarSpec:
    assert output is not None
    return output.spec


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("response_format", "structured_outputs"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "text", "json_schema": None}, None),
        (None, {}),
        (None, {"json_object": False}),
        ({"type": "text"}, {"json": None, "regex": None}),
    ],
)
def test_any_text(response_format: Any, structured_outputs: Any) -> None:
    assert structured_output(response_format, structured_outputs) is None


def test_any_object() -> None:
    output = structured_output({"type": "json_object"}, None)
    assert output == StructuredOutput(NO_TEXT, "response_format")
    output = structured_output(None, {"json_object": True})
    assert output == StructuredOutput(NO_TEXT, "structured_outputs.json_object")


@pytest.mark.parametrize("strict", [True, False, None])
def test_openai_schema_keeps_the_order_of_its_keys(strict: bool | None) -> None:
    output = structured_output(openai(SCHEMA, strict=strict, description="what it is"), None)
    assert output is not None
    assert output.param == "response_format.json_schema.schema"
    assert output.spec.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(output.spec.text) == SCHEMA
    assert output.spec.text.index('"b"') < output.spec.text.index('"a"')


def test_vllm_schema_may_be_text() -> None:
    as_object = structured_output(None, {"json": SCHEMA})
    as_text = structured_output({"type": "text"}, {"json": json.dumps(SCHEMA, indent=2)})
    assert as_object == as_text
    assert as_object is not None
    assert as_object.param == "structured_outputs.json"
    assert spec(as_object) == spec(structured_output(openai(SCHEMA), None))


def test_the_other_kinds_of_vllm() -> None:
    for key, kind in (("regex", GrammarKind.REGEX), ("grammar", GrammarKind.LARK)):
        output = structured_output(None, {key: "some text", "json": None})
        expected = StructuredOutput(GrammarSpec(kind, "some text"), f"structured_outputs.{key}")
        assert output == expected
    choice = spec(structured_output(None, {"choice": ["yes", 'n"o', "é"]}))
    assert choice.kind is GrammarKind.CHOICE
    assert json.loads(choice.text) == ["yes", 'n"o', "é"]


OPENAI = "response_format"
VLLM = "structured_outputs"
MALFORMED: list[tuple[str, Any, str]] = [
    (OPENAI, {}, "response_format.type"),
    (OPENAI, {"type": None}, "response_format.type"),
    (OPENAI, {"type": "yaml"}, "response_format.type"),
    (OPENAI, {"type": ["text"]}, "response_format.type"),
    (OPENAI, {"type": "text", "schema": {}}, "response_format.schema"),
    (OPENAI, {"type": "json_object", "json_schema": {}}, "response_format.json_schema"),
    (OPENAI, {"type": "json_schema"}, "response_format.json_schema"),
    (OPENAI, {"type": "json_schema", "json_schema": []}, "response_format.json_schema"),
    (OPENAI, {"type": "json_schema", "json_schema": {}}, "response_format.json_schema.name"),
    (OPENAI, openai({}, name=7), "response_format.json_schema.name"),
    (OPENAI, openai({}, name=""), "response_format.json_schema.name"),
    (OPENAI, openai({}, name="two words"), "response_format.json_schema.name"),
    (OPENAI, openai({}, name="n" * 65), "response_format.json_schema.name"),
    (OPENAI, openai({}, strict="yes"), "response_format.json_schema.strict"),
    (OPENAI, openai({}, description=1), "response_format.json_schema.description"),
    (OPENAI, openai({}, extra=1), "response_format.json_schema.extra"),
    (OPENAI, openai(None), "response_format.json_schema.schema"),
    (OPENAI, openai("{}"), "response_format.json_schema.schema"),
    (OPENAI, openai(True), "response_format.json_schema.schema"),
    (OPENAI, openai(nested(33)), "response_format.json_schema.schema"),
    (OPENAI, openai({"const": float("nan")}), "response_format.json_schema.schema"),
    (OPENAI, openai({"const": "x" * MAX_GRAMMAR_BYTES}), "response_format.json_schema.schema"),
    (OPENAI, openai({"x-guidance": {}}), "response_format.json_schema.schema.x-guidance"),
    (VLLM, {"structural_tag": "x"}, "structured_outputs.structural_tag"),
    (VLLM, {"regex": "a", "choice": ["a"]}, "structured_outputs"),
    (VLLM, {"json_object": "yes"}, "structured_outputs.json_object"),
    (VLLM, {"json_object": True, "json": {}}, "structured_outputs"),
    (VLLM, {"json": "{"}, "structured_outputs.json"),
    (VLLM, {"json": "[1]"}, "structured_outputs.json"),
    (VLLM, {"json": False}, "structured_outputs.json"),
    (VLLM, {"json": '{"items":' * 9000 + "1" + "}" * 9000}, "structured_outputs.json"),
    (VLLM, {"json": '{"const": NaN}'}, "structured_outputs.json"),
    (VLLM, {"regex": ""}, "structured_outputs.regex"),
    (VLLM, {"regex": 1}, "structured_outputs.regex"),
    (VLLM, {"regex": "é" * MAX_GRAMMAR_BYTES}, "structured_outputs.regex"),
    (VLLM, {"regex": "\ud800"}, "structured_outputs.regex"),
    (VLLM, {"grammar": ["x"]}, "structured_outputs.grammar"),
    (VLLM, {"choice": []}, "structured_outputs.choice"),
    (VLLM, {"choice": "ab"}, "structured_outputs.choice"),
    (VLLM, {"choice": ["a", 1]}, "structured_outputs.choice"),
    (VLLM, {"choice": ["a"] * 1001}, "structured_outputs.choice"),
]


@pytest.mark.parametrize(("field", "value", "param"), MALFORMED)
def test_what_is_malformed_is_named(field: str, value: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        structured_output(
            value if field == OPENAI else None, value if field == VLLM else {"regex": None}
        )
    assert refusal.value.param == param
    assert refusal.value.message.startswith(param)
    assert len(refusal.value.message) < 300


def test_the_deepest_schema_that_is_taken() -> None:
    assert structured_output(openai(nested(32)), None) is not None


def test_one_of_the_two_fields_only() -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        structured_output({"type": "json_object"}, {"regex": "a"})
    assert refusal.value.param == "structured_outputs"


def test_what_compiles_passes(checker: GrammarChecker) -> None:
    for seed in range(40):
        output = structured_output(openai(random_schema(seed)), None)
        assert output is not None
        check_compiles(output, checker)
    for field in ({"regex": "[ab]+"}, {"choice": ["a", ""]}, {"grammar": 'root ::= "a"'}):
        output = structured_output(None, field)
        assert output is not None
        check_compiles(output, checker)


@pytest.mark.parametrize(
    "name", ["prime multiple", "references in a chain", "no match", "lookahead"]
)
def test_what_does_not_compile_is_refused_by_its_name(checker: GrammarChecker, name: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        check_compiles(StructuredOutput(REFUSED[name], "structured_outputs.regex"), checker)
    assert refusal.value.param == "structured_outputs.regex"
    assert refusal.value.message.startswith("structured_outputs.regex cannot be used: ")


def test_the_router_neither_compiles_nor_computes() -> None:
    program = (
        "import sys, router.structured_output\n"
        "print(*sorted({'torch', 'llguidance', 'engine', 'numpy'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == []
