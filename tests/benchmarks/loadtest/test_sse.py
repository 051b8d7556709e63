"""Events come out the same wherever the network cuts them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loadtest.sse import MAX_LINE_BYTES, EventReader

STREAM = (
    b': a comment\n\ndata: {"a": 1}\n\ndata:{"b": "\xc3\xa9"}\r\n\r\n'
    b"event: x\nid: 3\ndata: one\ndata: two\n\ndata: [DONE]\n\ndata: unfinished\n"
)
EVENTS = [b'{"a": 1}', b'{"b": "\xc3\xa9"}', b"one\ntwo", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_chunks_cut_anywhere(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()
    read = []
    for start, end in pairwise(places):
        read += reader.feed(STREAM[start:end])
    assert read == EVENTS


def test_byte_by_byte() -> None:
    reader = EventReader()
    assert [e for byte in STREAM for e in reader.feed(bytes([byte]))] == EVENTS


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    with pytest.raises(ValueError, match="bytes"):
        list(EventReader().feed(b"data: " + b"x" * MAX_LINE_BYTES))
