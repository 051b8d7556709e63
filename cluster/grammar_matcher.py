"""From a GrammarSpec to an automaton of llguidance. The verifier and the check both come here, so
that they cannot differ.

Compiling may take forever, or run out of stack and end the process: only `grammar_check.py` makes a
client's text safe.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from cluster.grammar import GrammarError, GrammarKind, GrammarSpec, check_size

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the tokens of JSON. Bounded, since a model may never stop writing spaces."""
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""Where only one text can follow, llguidance allows just its canonical tokens, which helps a model.
To know that text it follows the grammar, and in one such as `/a*/ "ab"` it never comes back: all
that may follow "a" is another, without end. A single regular expression has an end to come to, and
so has every token of JSON; but this is not known of a grammar."""
_MAX_MESSAGE_LEN = 300

_LIMITS = LLParserLimits(
    # A quarter of the default. It also bounds how long one mask can take where the grammar forces
    # very long text: 0.2 s instead of 1.5 s.
    initial_lexer_fuel=250_000,
    # Else compiling would take longer with a real vocabulary than in the check.
    precompute_large_lexemes=False,
    # Messages go to clients.
    verbose_errors=False,
)


def compile_matcher(tokenizer: LLTokenizer, spec: GrammarSpec) -> LLMatcher:
    """The automaton at its start. Raises GrammarError."""
    check_size(spec)
    matcher = LLMatcher(tokenizer, _source(spec), log_level=0, limits=_LIMITS)
    raise_if_broken(matcher)
    return matcher


def forces_tokens(spec: GrammarSpec) -> bool:
    """Whether the automaton follows ahead what the grammar forces. One that does not must not be
    asked for it."""
    return spec.kind is not GrammarKind.LARK


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
    match spec.kind:
        case GrammarKind.JSON_OBJECT:
            return _json_source({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            return _json_source(_parsed(spec.text))
        case GrammarKind.REGEX:
            # Digits, word characters and space are those of ASCII: so what is generated matches
            # whatever engine the client checks it with.
            return _lark_source(f"start: /{regex_to_lark(spec.text, use_ascii='dws')}/")
        case GrammarKind.LARK:
            return _lark_source(_NO_FORCING + _lark(spec.text))
        case GrammarKind.CHOICE:
            return _lark_source(f"start: CHOICE\nCHOICE: {_alternatives(_parsed(spec.text))}")


def _json_source(schema: Any) -> str:
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
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _lark_source(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _alternatives(choices: Any) -> str:
    if not choices or not isinstance(choices, list):
        raise GrammarError("there is nothing to choose from")
    return " | ".join(json.dumps(str(choice)) for choice in choices)


def _lark(text: str) -> str:
    if "::=" not in text:
        return text
    try:
        return any_to_lark(text)
    except Exception as error:  # noqa: BLE001 - it raises nothing more specific
        raise GrammarError(f"not valid GBNF: {_shortened(str(error))}") from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"not valid JSON: {error}") from None


def _shortened(message: str) -> str:
    """One line. Where a parser quotes the text, what is wrong stands at the end."""
    message = " ".join(message.replace("<non-verbose/>", "").split())
    if len(message) <= _MAX_MESSAGE_LEN:
        return message
    half = _MAX_MESSAGE_LEN // 2
    return f"{message[:half]} ... {message[-half:]}"
