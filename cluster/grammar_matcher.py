"""From a GrammarSpec to an automaton of llguidance. The verifier and the check both come here, so
that they cannot differ.

Compiling may take forever, or run out of stack and end the process: only `grammar_check.py` makes a
client's text safe.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from cluster.grammar import GrammarError, GrammarKind, GrammarSpec, check_size

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the tokens of JSON. Bounded, since a model may never stop writing spaces."""
_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Else it would follow what the grammar forces to its end; see engine/forced_text.py."""
_MAX_MESSAGE_LEN = 300
_PLACE = re.compile(r"(?:at )?(\d+)\(\d+\): (?:failed to compile JSON schema: )?")
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_QUOTED = re.compile(r" +(?:\d+ \||\^+ *$)")

_LIMITS = LLParserLimits(
    initial_lexer_fuel=250_000,  # A quarter of the default.
    # Else compiling would take longer with a real vocabulary than in the check.
    precompute_large_lexemes=False,
    # Messages go to clients.
    verbose_errors=False,
)


def compile_matcher(tokenizer: LLTokenizer, spec: GrammarSpec) -> LLMatcher:
    """The automaton at its start. Raises GrammarError."""
    check_size(spec)
    matcher = LLMatcher(tokenizer, _source(spec), log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarError(_complaint(matcher.get_error(), spec.kind))
    return matcher


def raise_if_broken(matcher: LLMatcher) -> None:
    """Raise GrammarError if the automaton has failed. Then it is of no more use."""
    if not matcher.is_error():
        return
    message = matcher.get_error()
    if message.startswith("NoExtensionBias"):
        raise GrammarError("the grammar allows nothing here")
    raise GrammarError(_shortened(message))


def _source(spec: GrammarSpec) -> str:
    """The grammar in llguidance's notation."""
    return json.dumps({"grammars": [{"lark_grammar": _OPTIONS + lark(spec)}]})


def lark(spec: GrammarSpec) -> str:
    """A spec in Lark's notation, from its rule `start`. Raises GrammarError."""
    match spec.kind:
        case GrammarKind.JSON_OBJECT:
            return _json_rule({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            return _json_rule(_parsed(spec.text))
        case GrammarKind.REGEX:
            # Digits, word characters and space are those of ASCII: so what is generated matches
            # whatever engine the client checks it with.
            return f"start: /{regex_to_lark(spec.text, use_ascii='dws')}/"
        case GrammarKind.LARK:
            return _from_gbnf(spec.text) if _GBNF_RULE.search(spec.text) else spec.text
        case GrammarKind.CHOICE:
            return f"start: CHOICE\nCHOICE: {_alternatives(_parsed(spec.text))}"


def _json_rule(schema: Any) -> str:
    options = {"x-guidance": {"whitespace_pattern": _WHITESPACE}}
    match schema:
        case dict():
            schema = schema | options
        case True:
            schema = options
        case False:
            raise GrammarError("the JSON Schema allows nothing")
        case _:
            raise GrammarError("a JSON Schema is an object")
    return f"start: %json {json.dumps(schema)}"


def _alternatives(choices: Any) -> str:
    if not choices or not isinstance(choices, list):
        raise GrammarError("there is nothing to choose from")
    return " | ".join(json.dumps(str(choice)) for choice in choices)


def _from_gbnf(text: str) -> str:
    try:
        return any_to_lark(text)
    except Exception as error:  # noqa: BLE001 - it raises nothing more specific
        raise GrammarError(f"not valid GBNF: {_shortened(str(error))}") from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"not valid JSON: {error}") from None


def _complaint(message: str, kind: GrammarKind) -> str:
    """What llguidance says of a source, as said of the client's text: with the line in a grammar,
    which starts one line later in the source, and without the lines quoted below."""
    said = "\n".join(line for line in message.splitlines() if not _QUOTED.match(line))
    place = _PLACE.match(said)
    if place is None:
        return _shortened(said)
    line = f"line {int(place[1]) - 1}: " if kind is GrammarKind.LARK else ""
    return _shortened(line + said[place.end() :])


def _shortened(message: str) -> str:
    """One line. Where a parser quotes the text, what is wrong stands at the end."""
    message = " ".join(message.replace("<non-verbose/>", "").split())
    if len(message) <= _MAX_MESSAGE_LEN:
        return message
    half = _MAX_MESSAGE_LEN // 2
    return f"{message[:half]} ... {message[-half:]}"
