"""What a grammar lets through is what the client asked for."""

from __future__ import annotations

import json
import random

import pytest
from jsonschema import Draft202012Validator, ValidationError

from cluster.grammar import GrammarKind
from tests.support.grammar_language import Language, embedded_language, tiny_language
from tests.support.grammar_walk import random_walk
from tests.support.hard_schemas import HARD
from tests.support.json_schemas import random_schema


@pytest.fixture(scope="module")
def language() -> Language:
    return embedded_language()


@pytest.fixture(scope="module")
def tiny() -> Language:
    return tiny_language()


# --- what comes out is what was asked for -------------------------------------------------------


@pytest.mark.parametrize("first_seed", range(0, 50, 10))
def test_random_generation_under_random_schemas_is_valid(
    language: Language, first_seed: int
) -> None:
    for seed in range(first_seed, first_seed + 10):
        schema = random_schema(seed)
        rng = random.Random(seed)
        token_ids = random_walk(language.schema(schema), rng, language.closing_ids)
        document = json.loads(language.tokenizer.decode(token_ids))
        Draft202012Validator(schema).validate(document)


def test_random_generation_with_single_characters_is_valid(tiny: Language) -> None:
    schema = {
        "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 9}},
        "required": ["n", "s"],
        "additionalProperties": False,
    }
    for seed in range(20):
        state, rng = tiny.schema(schema), random.Random(seed)
        token_ids = random_walk(state, rng, tiny.closing_ids)
        document = json.loads(tiny.tokenizer.decode(token_ids))
        Draft202012Validator(schema).validate(document)


def test_the_validator_would_notice() -> None:
    with pytest.raises(ValidationError):
        Draft202012Validator(random_schema(0)).validate([])


def test_any_object(language: Language) -> None:
    rng = random.Random(5)
    for _ in range(5):
        state = language.compile(GrammarKind.JSON_OBJECT)
        text = language.tokenizer.decode(random_walk(state, rng, language.closing_ids))
        assert isinstance(json.loads(text), dict)


# --- hard schemas, by hand ----------------------------------------------------------------------


@pytest.mark.parametrize("name", HARD)
def test_hard_schemas(language: Language, name: str) -> None:
    schema, valid, invalid = HARD[name]
    for text in valid:
        assert language.takes(language.schema(schema), text), text
    for text in invalid:
        assert not language.takes(language.schema(schema), text), text


def test_whitespace_is_allowed_and_bounded(language: Language) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for text in ('{"a":1}', '{ "a": 1 }', '{\n  "a": 1\n}', '{\n\t"a"\t:\r\n1}'):
        assert language.takes(language.schema(schema), text), text
    for text in (' {"a":1}', '{"a":1}\n', '{"a":' + " " * 33 + "1}"):
        assert not language.takes(language.schema(schema), text), text


# --- other kinds ---------------------------------------------------------------------------------

SQL = """root ::= "SELECT " column " FROM " table
column ::= "one" | "two" # either
table ::= [a-z]+ ("_" [0-9]{1,2})?
"""
AWKWARD = ["a", "ab", 'q"uote', "new\nline", "back\\slash", "é😀", "/x/", "\x01", "a{2}", "# c", ""]


@pytest.mark.parametrize(
    ("kind", "text", "valid", "invalid"),
    [
        (GrammarKind.REGEX, r"(foo|bar)+\d", ["foo1", "barfoo2"], ["foo", "1", "foo1x"]),
        (GrammarKind.REGEX, r"^a/b$", ["a/b"], ["^a/b$", "xa/b"]),
        (GrammarKind.REGEX, r"\d\w\s", ["1a "], ["٣a ", "1é ", "1a\u00a0"]),
        (GrammarKind.REGEX, r"[^a]", ["é", "😀", "\n"], ["a", "bb"]),
        (GrammarKind.REGEX, "(?i)yes|no", ["YES", "No"], ["maybe"]),
        (GrammarKind.LARK, 'start: "(" start ")" | "x"', ["x", "((x))"], ["((x)", ""]),
        (GrammarKind.LARK, 'start: %json {"const": 1} "!"', ["1!"], ["1", "2!"]),
        (GrammarKind.LARK, SQL, ["SELECT one FROM t", "SELECT two FROM a_12"], ["SELECT x"]),
        (GrammarKind.CHOICE, json.dumps(AWKWARD), AWKWARD, ["b", "abc", "new", "aab"]),
    ],
)
def test_other_kinds(
    language: Language, kind: GrammarKind, text: str, valid: list[str], invalid: list[str]
) -> None:
    for sample in valid:
        assert language.takes(language.compile(kind, text), sample), sample
    for sample in invalid:
        assert not language.takes(language.compile(kind, text), sample), sample
