"""Schemas that are hard to get right, each with texts that are valid under it and texts that are
not."""

from __future__ import annotations

_PLACE = {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}}
_NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
    },
    "required": ["value"],
    "additionalProperties": False,
}
_SHAPES = [
    {"properties": {"kind": {"const": "circle"}, "r": {"type": "number"}}, "required": ["r"]},
    {"properties": {"kind": {"const": "square"}, "a": {"type": "number"}}, "required": ["a"]},
]
_UUID = "00000000-1111-4222-8333-444444444444"

HARD: dict[str, tuple[object, list[str], list[str]]] = {
    "anything": (True, ["1", '"a"', "[]", "{}", "null"], ["", "x", "{", "01"]),
    "constant": ({"const": {"a": [1, {"b": None}]}}, ['{"a":[1,{"b":null}]}'], ['{"a":[1]}', "{}"]),
    "values": (
        {"enum": ["a", "ab", 1, None, 'q"']},
        ['"a"', '"ab"', "1", "null", r'"q\""'],
        ['"b"', "2", "a"],
    ),
    "integers": (
        {"type": "integer", "minimum": -5, "maximum": 17},
        ["-5", "0", "17"],
        ["-6", "18", "1.5", "007"],
    ),
    "multiples": ({"type": "integer", "multipleOf": 7}, ["0", "14", "-21"], ["1", "15"]),
    "numbers": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        ["0.25", "1"],
        ["0", "1.01", "-1"],
    ),
    "lengths in characters": (
        {"type": "string", "minLength": 2, "maxLength": 3},
        ['"é😀"', '"abc"'],
        ['"a"', '"abcd"', '"😀"'],
    ),
    "pattern": (
        {"type": "string", "pattern": r"^\d{3}-[a-f]+$"},
        ['"123-abc"'],
        ['"12-abc"', '"123-xyz"', '"123-"'],
    ),
    "pattern anywhere": ({"type": "string", "pattern": "x"}, ['"x"', '"axb"'], ['""', '"abc"']),
    "date": ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-13-01"', '"today"']),
    "uuid": ({"type": "string", "format": "uuid"}, [f'"{_UUID}"'], ['"1"', f'"{_UUID}0"']),
    "two types": ({"type": ["string", "null"], "maxLength": 1}, ["null", '"a"'], ["1", '"ab"']),
    "array": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        ["[1]", "[1, 2]"],
        ["[]", "[1,2,3]", "[1,]"],
    ),
    "tuple": (
        {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "string"}},
        ['[1,"a"]', "[]"],
        ['["a"]', "[1,2]"],
    ),
    "objects in an array": (
        {"type": "array", "items": _PLACE, "minItems": 1},
        ['[{"zip":"12345"}]', "[{}]"],
        ['[{"zip":"1234"}]', "[]"],
    ),
    "recursion": (
        {"$defs": {"node": _NODE}, "$ref": "#/$defs/node"},
        ['{"value":1,"children":[{"value":2,"children":[]}]}'],
        ['{"value":1,"children":[{}]}'],
    ),
    "alternatives beside other keywords": (
        {"anyOf": _SHAPES, "type": "object", "required": ["kind"]},
        ['{"kind":"circle","r":1}', '{"kind": "square", "a": 2}'],
        ['{"kind":"circle","a":1}', '{"kind":"circle"}'],
    ),
    "intersection": (
        {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 2}]},
        ['"ab"'],
        ['"a"', '"abc"', "1"],
    ),
    "keys by pattern": (
        {
            "type": "object",
            "patternProperties": {"^x_": {"type": "integer"}},
            "additionalProperties": False,
        },
        ['{"x_a":1}', "{}"],
        ['{"y":1}', '{"x_a":"1"}'],
    ),
    "a map that is not empty": (
        {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
        ['{"a":true}'],
        ["{}", '{"a":1}'],
    ),
    "odd keys": (
        {
            "type": "object",
            "properties": {"": {"type": "null"}, 'a"b': {"type": "null"}},
            "additionalProperties": False,
        },
        ['{"":null}', r'{"":null,"a\"b":null}', "{}"],
        ['{"c":null}'],
    ),
    "one of disjoint types": (
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        ["1", '"a"'],
        ["null", "1.5"],
    ),
}
