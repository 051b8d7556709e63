"""Traces in both forms."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.loadtest.arrivals import Arrival
from benchmarks.loadtest.profile import SHIPPED
from benchmarks.loadtest.trace import read_trace
from cluster.commands.command_error import CommandError

EXPECTED = (Arrival(0.0, 100, 10), Arrival(0.25, 300, 7), Arrival(61.5, 20, 3))
CSV = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:59:03.0000000,100,10
2023-11-16 19:00:04.5000000,20,3
2023-11-16 18:59:03.2500000,300,7
"""
SECONDS_CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n5,100,10\n5.25,300,7\n66.5,20,3\n"
JSONL = "\n".join(
    json.dumps({"timestamp": ms, "input_length": i, "output_length": o, "hash_ids": [0]})
    for ms, i, o in ((3_000, 100, 10), (3_250, 300, 7), (64_500, 20, 3))
)


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", CSV), ("b.csv", SECONDS_CSV), ("c.jsonl", JSONL)]
)
def test_both_forms_zipped_and_not(tmp_path: Path, name: str, text: str) -> None:
    plain, zipped = tmp_path / name, tmp_path / f"{name}.gz"
    plain.write_text(text)
    zipped.write_bytes(gzip.compress(text.encode()))
    for path in (plain, zipped):
        read = read_trace(path)
        assert [row.offset_s for row in read] == pytest.approx([row.offset_s for row in EXPECTED])
        assert [(r.prompt_tokens, r.output_tokens) for r in read] == [(100, 10), (300, 7), (20, 3)]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n1,x,3\n", "row 2"),
        ("a.csv", "time,in,out\n1,2,3\n", "TIMESTAMP"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,-2,3\n", "negative"),
        ("a.jsonl", '{"timestamp": 1}\n', "input_length"),
        ("a.jsonl", "nonsense\n", "row 1"),
        ("a.jsonl", "", "empty"),
        ("a.txt", "1 2 3", ".csv or .jsonl"),
    ],
)
def test_a_bad_trace_says_what_is_wrong(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CommandError, match=r".+") as caught:
        read_trace(tmp_path / name)
    assert told in str(caught.value)


def test_a_missing_trace() -> None:
    with pytest.raises(CommandError, match="cannot read the trace"):
        read_trace(Path("/nowhere/trace.csv"))


def test_the_shipped_trace_is_bursty() -> None:
    offsets = [row.offset_s for row in read_trace(SHIPPED / "traces" / "bursts.csv")]
    gaps = [later - earlier for earlier, later in pairwise(offsets)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 / mean > 2
