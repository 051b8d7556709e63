"""Reading expositions back, with prometheus_client's own parser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Series:
    """A name and its labels."""

    name: str
    labels: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, name: str, **labels: str) -> Series:
        return cls(name, frozenset(labels.items()))

    def label(self, name: str) -> str:
        return dict(self.labels)[name]


def series_of(text: str) -> dict[Series, float]:
    """Every series and its value. Fails if one stands there twice."""
    found: dict[Series, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series = Series.of(sample.name, **sample.labels)
            assert series not in found, f"twice: {series}"
            found[series] = sample.value
    return found


def matching(text: str, name: str, **labels: str) -> Iterator[tuple[Series, float]]:
    """The series of this name that have these labels, among others."""
    for series, value in series_of(text).items():
        if series.name == name and labels.items() <= dict(series.labels).items():
            yield series, value


def total(text: str, name: str, **labels: str) -> float:
    """The sum of the series of this name that have these labels, of which there must be one."""
    values = [value for _, value in matching(text, name, **labels)]
    assert values, f"no series {name} {labels}"
    return sum(values)


def types_of(text: str) -> dict[str, str]:
    """What the TYPE lines say, by the name that stands there."""
    lines = (line.split(" ") for line in text.splitlines() if line.startswith("# TYPE "))
    return {name: kind for _, _, name, kind in lines}
