"""What a PromQL expression reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser


@dataclass(frozen=True)
class Read:
    """One metric in an expression, and the matchers on its labels."""

    name: str
    labels: dict[str, str]


def reads(expression: str) -> list[Read]:
    """Raises ValueError if it is no PromQL."""
    return list(_reads(promql_parser.parse(expression)))


def grouping_labels(expression: str) -> set[str]:
    """Labels that some aggregation keeps by name."""
    return {
        label
        for node in _nodes(promql_parser.parse(expression))
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None
        if node.modifier.type == promql_parser.AggModifierType.By
        for label in node.modifier.labels
    }


def _reads(root: Any) -> Iterator[Read]:
    for node in _nodes(root):
        if isinstance(node, promql_parser.VectorSelector):
            matchers = node.matchers.matchers
            yield Read(node.name, {one.name: one.value for one in matchers})


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        below = getattr(node, name, None)
        if below is not None:
            yield from _nodes(below)
    for argument in getattr(node, "args", ()):
        yield from _nodes(argument)
