"""Structured output at the router: what reaches the verifier, and what is refused at the edge."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.grammar import GrammarKind, GrammarSpec
from tests.router.deployment import deploy
from tests.support.scripted_verifier import ScriptedVerifier, saying

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
DEEP: Any = {"type": "integer"}
for _ in range(35):
    DEEP = {"type": "array", "items": DEEP}


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec(GrammarKind.JSON_OBJECT)),
        (
            {"response_format": json_schema(SCHEMA, strict=True)},
            GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":"))),
        ),
        (
            {"structured_outputs": {"regex": "[a-z]{3}"}},
            GrammarSpec(GrammarKind.REGEX, "[a-z]{3}"),
        ),
        (
            {"structured_outputs": {"choice": ["yes", "no"]}},
            GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]'),
        ),
    ],
)
async def test_the_grammar_reaches_the_verifier(fields: dict[str, Any], expected: Any) -> None:
    async with deploy(ScriptedVerifier(saying("ok"))) as deployment:
        for send in (deployment.chat, deployment.complete):
            response = await send(**fields)
            assert response.status_code == 200, response.text
        assert [request.grammar for request in deployment.verifier.submitted] == [expected] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema({"type": 7})}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(DEEP)}, None),  # The body is too deep as a whole.
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"]}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
    ],
)
async def test_what_cannot_be_used_is_refused(fields: dict[str, Any], param: str) -> None:
    async with deploy(ScriptedVerifier(saying("ok"))) as deployment:
        response = await deployment.chat(**fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert (await deployment.chat()).status_code == 200
        assert deployment.verifier.num_running == 0
