"""Reads recorded traffic: when requests came, and how long they and their answers were."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from benchmarks.loadtest.arrivals import Arrival
from cluster.commands.command_error import CommandError


def read_trace(path: Path) -> tuple[Arrival, ...]:
    """All requests of a trace in order of time, the first at 0 s. Raises CommandError."""
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in (".csv", ".jsonl"):
        raise CommandError(f"{path}: a trace must be .csv or .jsonl, or one of these with .gz")
    rows: list[Arrival] = []
    try:
        with _opened(path) as file:
            for row in _azure(file) if suffix == ".csv" else _mooncake(file):
                rows.append(row)
    except OSError as error:
        raise CommandError(f"cannot read the trace {path} ({error})") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CommandError(
            f"{path}: row {len(rows) + 1} is no request of a trace ({error!r}). A .csv needs the "
            "columns TIMESTAMP, ContextTokens, GeneratedTokens; a .jsonl rows with timestamp (ms), "
            "input_length, output_length"
        ) from None
    if not rows:
        raise CommandError(f"{path}: the trace is empty")
    return _from_zero(rows)


def _from_zero(rows: Iterable[Arrival]) -> tuple[Arrival, ...]:
    ordered = sorted(rows, key=lambda row: row.offset_s)
    first_s = ordered[0].offset_s
    return tuple(
        Arrival(row.offset_s - first_s, row.prompt_tokens, row.output_tokens) for row in ordered
    )


def _opened(path: Path) -> TextIO:
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open()


def _azure(file: TextIO) -> Iterator[Arrival]:
    for row in csv.DictReader(file):
        yield Arrival(
            _seconds(row["TIMESTAMP"]),
            _length(row, "ContextTokens"),
            _length(row, "GeneratedTokens"),
        )


def _mooncake(file: TextIO) -> Iterator[Arrival]:
    for line in file:
        if line.strip():
            row = json.loads(line)
            yield Arrival(
                float(row["timestamp"]) / 1_000,
                _length(row, "input_length"),
                _length(row, "output_length"),
            )


def _length(row: Mapping[str, Any], name: str) -> int:
    length = int(row[name])
    if length < 0:
        raise ValueError(f"{name} is negative")
    return length


def _seconds(stamp: str) -> float:
    """Of seconds, or of a date whose fraction may have more digits than datetime reads."""
    try:
        return float(stamp)
    except ValueError:
        whole, _, fraction = stamp.partition(".")
        return datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")
