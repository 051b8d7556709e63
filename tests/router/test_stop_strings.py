"""Stop strings are found whatever the pieces, and nothing of a match is shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.stop_strings import StopStrings

letters = st.text("ab", max_size=12)
stops_of_letters = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def shown(text: str, stops: list[str]) -> tuple[str, bool]:
    """What the client should see, by the definition, character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    matcher = StopStrings(stops)
    seen = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        seen.append(text)
        if stopped:
            return seen, True
    return [*seen, matcher.finish()], False


@given(pieces=st.lists(letters, max_size=10), stops=stops_of_letters)
def test_the_cut_into_pieces_changes_nothing(pieces: list[str], stops: list[str]) -> None:
    seen, stopped = run(pieces, stops)
    assert ("".join(seen), stopped) == shown("".join(pieces), stops)


@given(pieces=st.lists(letters, max_size=10), stops=stops_of_letters)
def test_no_more_is_held_back_than_a_match_needs(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    pushed = given_out = 0
    for piece in pieces:
        text, stopped = matcher.push(piece)
        if stopped:
            return
        pushed += len(piece)
        given_out += len(text)
        assert 0 <= pushed - given_out < max(map(len, stops))


def test_a_match_over_three_pieces() -> None:
    assert run(["xE", "N", "Dy"], ["END"]) == (["x", "", ""], True)


def test_a_beginning_that_leads_nowhere_is_shown() -> None:
    assert run(["xEN", "x"], ["END"]) == (["x", "ENx", ""], False)
    assert run(["xEN"], ["END"]) == (["x", "EN"], False)


def test_a_stop_at_the_start_of_a_long_block() -> None:
    assert run(["END" + "filler" * 14], ["END"]) == ([""], True)
