"""Latencies of a request, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.loadtest.profile import Slo
from benchmarks.loadtest.record import Outcome, read_records, write_records
from tests.benchmarks.loadtest.records import ok, refused, speculated

# Due at 1.0, sent at 1.2; chunks of 3, 2 and 2 tokens at 1.5, 1.7 and 1.9; [DONE] at 2.0.
RECORD = replace(
    ok(1.0, 2.0), sent_s=1.2, chunk_s=(1.5, 1.7, 1.9), chunk_tokens=(3, 5, 7), output_tokens=7
)


def test_times_count_from_the_scheduled_send() -> None:
    assert RECORD.schedule_delay_s == pytest.approx(0.2)
    assert RECORD.ttft_s == pytest.approx(0.5)
    assert RECORD.e2e_s == pytest.approx(1.0)


def test_tpot_leaves_out_the_tokens_of_the_first_chunk() -> None:
    assert RECORD.tpot_s == pytest.approx(0.5 / (7 - 3))
    assert replace(RECORD, chunk_tokens=()).tpot_s == pytest.approx(0.5 / (7 - 1))


def test_no_tpot_without_later_tokens() -> None:
    assert replace(RECORD, chunk_tokens=(7, 7, 7)).tpot_s is None
    assert replace(RECORD, output_tokens=None, chunk_tokens=()).tpot_s is None
    assert replace(RECORD, chunk_s=(), chunk_tokens=(), output_tokens=0).tpot_s is None


def test_tokens_of_each_chunk() -> None:
    assert RECORD.new_tokens() == [3, 2, 2]
    assert replace(RECORD, chunk_tokens=()).new_tokens() == pytest.approx([7 / 3] * 3)
    assert replace(RECORD, output_tokens=9).new_tokens() == [3, 2, 4], "two came without text"
    assert refused().new_tokens() == []


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({}, True),
        ({"ttft_ms": 501}, True),
        ({"ttft_ms": 499}, False),
        ({"tpot_ms": 126}, True),
        ({"tpot_ms": 124}, False),
        ({"e2e_ms": 1001, "ttft_ms": 501, "tpot_ms": 126}, True),
        ({"e2e_ms": 999, "ttft_ms": 501, "tpot_ms": 126}, False),
    ],
)
def test_what_meets_the_slo(slo: dict[str, float], good: bool) -> None:
    assert RECORD.meets(Slo(**slo)) is good


def test_what_did_not_end_well_meets_no_slo() -> None:
    for outcome in Outcome:
        assert replace(RECORD, outcome=outcome).meets(Slo()) is (outcome is Outcome.OK)


def test_an_answer_without_text_has_its_end_for_a_first_token() -> None:
    silent = replace(RECORD, chunk_s=(), chunk_tokens=(), output_tokens=0)
    assert silent.meets(Slo(ttft_ms=1001))
    assert not silent.meets(Slo(ttft_ms=999))


def test_records_come_back_from_their_file(tmp_path: Path) -> None:
    written = [RECORD, refused(3.0), speculated([1, 2, 3], 12)]
    write_records(tmp_path / "requests.jsonl", written)
    assert read_records(tmp_path / "requests.jsonl") == written
