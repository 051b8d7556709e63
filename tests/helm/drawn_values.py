"""Values that the chart's schema allows, drawn by hypothesis."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.helm.config_schema import SCHEMA

_SCHEMA: dict[str, Any] = json.loads(SCHEMA.read_text())
_ODD_TEXT = st.sampled_from(
    ["", "x", "a: b", "'", '"', "{{ fail }}", "#", "- a", "true", "1e3", "é"]
)
_MOST_ITEMS = 2


def values() -> st.SearchStrategy[dict[str, Any]]:
    """A few sections, each drawn from its own schema."""
    sections = {
        name: drawn(schema) for name, schema in _SCHEMA["properties"].items() if name != "global"
    }
    names = st.lists(st.sampled_from(sorted(sections)), min_size=1, max_size=3, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({n: sections[n] for n in chosen}))


def drawn(schema: Any) -> st.SearchStrategy[Any]:
    """Of one schema; only the words of JSON Schema that ours uses are known."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return st.deferred(lambda: drawn(_SCHEMA["definitions"][name]))
    for word in ("anyOf", "oneOf"):
        if word in schema and "type" not in schema:
            return st.one_of([drawn(one) for one in schema[word]])
    if "allOf" in schema:
        return drawn(schema["allOf"][0])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema.get("type", "string")
    if isinstance(kinds, list):
        kinds = kinds[0]
    return _BY_TYPE[kinds](schema)


def _string(schema: Any) -> st.SearchStrategy[Any]:
    if "pattern" in schema:
        return st.from_regex(schema["pattern"].replace("$", r"\Z"), alphabet=_ASCII).filter(
            lambda text: text not in ("latest",)
        )
    return _ODD_TEXT.filter(lambda text: len(text) >= schema.get("minLength", 0))


_ASCII = st.characters(min_codepoint=33, max_codepoint=126)


def _integer(schema: Any) -> st.SearchStrategy[Any]:
    lowest = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
    highest = schema.get("maximum", 2**31 - 1)
    return st.one_of(
        st.just(lowest), st.just(highest), st.integers(lowest, min(highest, lowest + 40))
    )


def _number(schema: Any) -> st.SearchStrategy[Any]:
    lowest = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 0.25)
    return st.sampled_from([lowest, lowest + 0.5, schema.get("maximum", lowest + 1000)])


def _array(schema: Any) -> st.SearchStrategy[Any]:
    least = schema.get("minItems", 0)
    items = drawn(schema["contains"] if "contains" in schema else schema["items"])
    return st.lists(items, min_size=max(least, "contains" in schema), max_size=_MOST_ITEMS)


def _object(schema: Any) -> st.SearchStrategy[Any]:
    properties = schema.get("properties", {})
    required = {
        name: drawn(properties[name]) for name in schema.get("required", ()) if name in properties
    }
    optional = {name: drawn(one) for name, one in properties.items() if name not in required}
    if properties:
        return st.fixed_dictionaries(required, optional=optional)
    more = schema.get("additionalProperties")
    if not isinstance(more, dict):
        return st.just({})
    keys = st.sampled_from(["team", "example.com/tier", "zone"])
    return st.dictionaries(keys, drawn(more), max_size=_MOST_ITEMS)


_BY_TYPE = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda _: st.booleans(),
    "null": lambda _: st.none(),
    "array": _array,
    "object": _object,
}
