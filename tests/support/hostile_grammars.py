"""Grammars that clients may send to hurt: too big, too deep, too slow, without end or sense."""

from __future__ import annotations

import json
from typing import Any

from cluster.grammar import GrammarKind, GrammarSpec


def _schema(schema: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _pattern(pattern: str) -> GrammarSpec:
    return _schema({"type": "string", "pattern": pattern})


def _regex(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


def _lark(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.LARK, text)


def _chain(step: str, num_steps: int, end: str) -> str:
    """Rules that name one another, each the next."""
    rules = [step.format(i=i, next=i + 1) for i in range(num_steps)]
    return "\n".join(["start: r0", *rules, f"r{num_steps}: {end}"])


def _ref_chain(step: Any, num_steps: int) -> GrammarSpec:
    """Definitions that refer to one another; NEXT in `step` is the next of them."""
    text = json.dumps(step)
    defs = {
        f"d{i}": json.loads(text.replace("NEXT", f"#/$defs/d{i + 1}")) for i in range(num_steps)
    }
    return _schema({"$defs": {**defs, f"d{num_steps}": {"type": "string"}}, "$ref": "#/$defs/d0"})


_NEXT = {"$ref": "NEXT"}
_INTEGER = {"type": "integer"}

REFUSED: dict[str, GrammarSpec] = {
    # too big
    "a million values": _schema({"enum": [f"v{i}" for i in range(1_000_000)]}),
    "a million rules": _lark(_chain('r{i}: "a" r{next}', 100_000, '"b"')),
    "huge text": _regex("x" * 1_000_000),
    "many optional properties": _schema({"properties": {f"p{i}": {} for i in range(9000)}}),
    # too deep: these overflow the stack of a process that compiles them
    "rules in a chain": _lark(_chain('r{i}: "a" r{next} | "b" r{next}', 4000, '"c"')),
    "rules in a plain chain": _lark(_chain("r{i}: r{next}", 6000, '"c"')),
    "terminals in a chain": _lark(_chain('R{i}: "a" R{next}', 5000, '"c"').upper()),
    "references in a chain": _ref_chain(_NEXT, 3000),
    "references in anyOf": _ref_chain({"anyOf": [_NEXT, _INTEGER]}, 1500),
    "references in objects": _ref_chain({"properties": {"a": _NEXT}, "required": ["a"]}, 1200),
    "nested text": GrammarSpec(GrammarKind.JSON_SCHEMA, '{"items":' * 9000 + "{}" + "}" * 9000),
    "nested schema": GrammarSpec(GrammarKind.JSON_SCHEMA, '{"items":' * 200 + "{}" + "}" * 200),
    "nested groups": _regex("(" * 5000 + "a" + ")" * 5000),
    "nested rule": _lark("start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "nested GBNF": _lark("root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    # too slow: these take seconds, or more than a lifetime
    "overlapping patternProperties": _schema(
        {"patternProperties": {f"^p{i}_": _INTEGER for i in range(300)}}
    ),
    "intersected patterns": _schema({"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(40)]}),
    "product of anyOf": _schema(
        {"allOf": [{"anyOf": [{"required": ["a"]}, {"required": ["b"]}]} for _ in range(30)]}
    ),
    "optional characters": _regex("[ax]?" * 10_000),
    "prime multiple": _schema({"type": "integer", "multipleOf": 999_983}),
    "nested counts": _regex("((a{1,100}){1,100}){1,100}"),
    # without end or sense
    "itself": _schema({"$ref": "#"}),
    "references in a circle": _schema(
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    ),
    "rules in a circle": _lark("start: a\na: b\nb: a"),
    "terminal of itself": _lark('start: A\nA: "a" A'),
    "no such definition": _schema({"$ref": "#/$defs/nothing"}),
    "reference to the network": _schema({"$ref": "http://127.0.0.1:9/schema.json"}),
    "reference to a file": _schema({"$ref": "file:///etc/passwd"}),
    "import of a file": _lark("%import ..secret.INT\nstart: INT"),
    "nothing": _schema(False),
    "no string": _pattern(r"[^\s\S]"),
    "no match": _regex(r"[^\s\S]"),
    "least over most": _schema({"type": "integer", "minimum": 5, "maximum": 3}),
    "unknown type": _schema({"type": "strin"}),
    "unknown format": _schema({"type": "string", "format": "no-such"}),
    "not implemented": _schema({"not": {"type": "string"}}),
    "multiple of zero": _schema({"type": "integer", "multipleOf": 0}),
    "number beyond floats": GrammarSpec(GrammarKind.JSON_SCHEMA, '{"minimum": 1e999}'),
    "count beyond integers": _schema({"type": "array", "minItems": 10**30}),
    "no JSON": GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": '),
    "no schema": GrammarSpec(GrammarKind.JSON_SCHEMA, "[1]"),
    "half a surrogate pair": GrammarSpec(GrammarKind.REGEX, "\ud800"),
    "half a surrogate pair, escaped": _schema({"const": "\ud800"}),
    "no choice": GrammarSpec(GrammarKind.CHOICE, "[]"),
    "no list": GrammarSpec(GrammarKind.CHOICE, '"ab"'),
    "unclosed class": _regex("(["),
    "lookahead": _regex("(?=a)b"),
    "backreference": _regex(r"(a)\1"),
    "no rules": _lark(""),
    "no Lark": _lark("start"),
    "no GBNF": _lark('root ::= "a'),
    "GBNF without a rule": _lark("root ::= other"),
    "unknown special token": _lark('start: "a" <|no_such|>'),
    "token beyond the vocabulary": _lark("start: <[99999999]>"),
    # what speculation cannot take back
    "max_tokens": _lark('start: a "x"\na[max_tokens=3]: /[a-z]+/'),
    "stop": _lark('start: a "x"\na[stop="q"]: /[a-z]+/'),
}

SERVED: dict[str, GrammarSpec] = {
    # What kills a backtracking matcher is nothing to an automaton.
    "exponential for backtracking": _regex("(a?){50}a{50}"),
    "nested quantifiers": _regex("((a+)+)+b"),
    "overlapping alternatives": _regex("(a|aa|a*)+"),
    "exponential automaton": _regex("[ab]*a[ab]{200}c"),
    "many words": _regex("|".join(f"w{i}" for i in range(5000))),
    "ten thousand values": _schema({"enum": [f"v{i}" for i in range(10_000)]}),
    "huge minItems": _schema({"type": "array", "items": _INTEGER, "minItems": 10**9}),
    "huge maxItems": _schema({"type": "array", "items": _INTEGER, "maxItems": 10**9}),
    "huge minLength": _schema({"type": "string", "minLength": 10**9}),
    "huge maxLength": _schema({"type": "string", "maxLength": 10**9}),
    "doubling references": _ref_chain({"properties": {"a": _NEXT, "b": _NEXT}}, 60),
    "doubling allOf": _ref_chain({"allOf": [_NEXT, _NEXT]}, 30),
    "doubling anyOf": _ref_chain({"anyOf": [_NEXT, _NEXT]}, 30),
    "tree": _schema({"properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}}),
    "ambiguous rules": _lark('start: e\ne: e e e | e e | "a" | ""'),
    "terminal that swallows the next": _lark('start: A B\nA: /a*/\nB: /aa"/'),
    "rule without end": _lark('start: x\nx: "a" x'),
    "rules of rules": _lark('start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"'),
    "forced text": _regex("a{1000000}"),
    "forced text behind a choice": _regex("(foo|ba" + "{2,5}" * 20 + "r)+"),
    "left recursion": _lark('start: start "a" | "a"'),
    "long forced text": _schema({"const": "x y " * 1500}),
}
