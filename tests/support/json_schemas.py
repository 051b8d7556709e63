"""Random JSON Schemas, deterministic by their seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ("a", "name", "two words", "größe", 'quo"te', "back\\slash", "", "id", "nested", "😀")
_PATTERNS = (
    r"^[a-z]{2,5}$",
    r"^\d{3}-\d{4}$",
    r"^(foo|bar|ba)+$",
    r"^[^A-Z]{0,9}[A-Z]",
    r"^[^\s@]{1,9}@[a-z]{1,9}\.(com|org)$",
    r"^\w{1,9}( \w{1,9}){0,3}$",
    r"^(ab?c*){1,4}$",
)
_VALUES = (0, -1, 3.5, True, False, None, "x", "two\nlines", 'a"b', "é😀", [], [1, "a"], {"k": 1})


def random_schema(seed: int) -> Schema:
    """An object at the top, as most clients have it; up to four levels."""
    rng = random.Random(seed)
    schema = _object(rng, 3)
    if rng.random() < 0.2:
        schema["$defs"] = {"shared": _any(rng, 1)}
        schema["properties"]["ref"] = {"$ref": "#/$defs/shared"}
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    flat: list[Callable[[random.Random, int], Schema]]
    flat = [_enum, _const, _integer, _number, _string, _boolean, _null, _types]
    deep = [_object, _object, _array, _array, _any_of]
    make = rng.choice(deep if depth > 0 and rng.random() < 0.5 else flat)
    return make(rng, depth)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    if (additional := rng.choice([None, False, False, True, {"type": "integer"}])) is not None:
        schema["additionalProperties"] = additional
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _any(rng, depth - 1)}
    if rng.random() < 0.6:
        schema["minItems"] = rng.randint(0, 3)
    if rng.random() < 0.7:
        schema["maxItems"] = schema.get("minItems", 0) + rng.randint(0, 3)
    if rng.random() < 0.2:
        schema["prefixItems"] = [_any(rng, 0)]
    return schema


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _enum(rng: random.Random, _: int) -> Schema:
    return {"enum": rng.sample(_VALUES, rng.randint(1, 5))}


def _const(rng: random.Random, _: int) -> Schema:
    return {"const": rng.choice(_VALUES)}


def _integer(rng: random.Random, _: int) -> Schema:
    low = rng.randint(-1000, 1000)
    schema: Schema = {"type": "integer"}
    if rng.random() < 0.6:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(10, 2000)
    if rng.random() < 0.2:
        schema["multipleOf"] = rng.randint(2, 5)
    return schema


def _number(rng: random.Random, _: int) -> Schema:
    low = rng.randint(-100, 100) / 8
    schema: Schema = {"type": "number"}
    if rng.random() < 0.6:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(1, 500) / 4
    return schema


def _string(rng: random.Random, _: int) -> Schema:
    schema: Schema = {"type": "string"}
    if rng.random() < 0.4:
        schema["pattern"] = rng.choice(_PATTERNS)
    elif rng.random() < 0.7:
        schema["minLength"] = rng.randint(0, 5)
        schema["maxLength"] = schema["minLength"] + rng.randint(0, 12)
    return schema


def _boolean(rng: random.Random, _: int) -> Schema:
    return {"type": "boolean"}


def _null(rng: random.Random, _: int) -> Schema:
    return {"type": "null"}


def _types(rng: random.Random, _: int) -> Schema:
    return {"type": rng.sample(["string", "integer", "null", "boolean"], 2), "maxLength": 9}
