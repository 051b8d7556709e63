"""Profiles: what comes along fits, what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.loadtest.cell import ClosedOffer, OpenOffer, plan_cells
from benchmarks.loadtest.profile import Profile, load_profile, shipped_profiles
from cluster.commands.command_error import CommandError

GOOD = "prompts: {kind: generated}\nload: {kind: closed, concurrency: [1, 2], duration_s: 1}\n"


def profile(tmp_path: Path, text: str) -> Profile:
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    return load_profile(str(path))


def test_those_that_come_along_can_be_planned() -> None:
    names = shipped_profiles()
    assert {"quick", "chat", "sweep", "swing", "overload", "bursts", "replay"} <= set(names)
    for name in names:
        shipped = load_profile(name)
        assert shipped.description
        cells = plan_cells(shipped, capacity_rps=3.0)
        for cell in cells:
            offer = cell.level.offer
            assert isinstance(offer, ClosedOffer) or len(offer.arrivals) > 5, name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (GOOD + "sede: 1\n", "sede: Extra inputs are not permitted"),
        (GOOD + "seed: -1\n", "seed: Input should be greater than or equal to 0"),
        (GOOD + "body: {max_tokens: 3}\n", "max_tokens: set by the load test itself"),
        (GOOD + "arms: [{name: a, body: {stream: false}}]\n", "arms: stream: set by"),
        (GOOD + "arms: [{name: a}, {name: a}]\n", "arms: two arms have one name"),
        (GOOD + "baseline: b\n", "baseline: there is no arm named 'b'"),
        (GOOD + "slo: {ttft_ms: 0}\n", "slo.ttft_ms"),
        ("prompts: {kind: generated}\n", "load: Field required"),
        (GOOD.replace("duration_s: 1", ""), "load.closed: give either duration_s or requests"),
        (GOOD.replace("duration_s", "seconds"), "load.closed.seconds: Extra inputs"),
        (GOOD.replace("closed", "closd"), "load: Input tag 'closd'"),
        (GOOD.replace("[1, 2]", "[]"), "load.closed.concurrency"),
        (
            "prompts: {kind: generated}\nload: {kind: open, rate: [1], cv: 2, duration_s: 1}",
            "load.open: cv needs arrivals: gamma",
        ),
        (
            "prompts: {kind: file, path: p}\nload: {kind: replay, trace: t.csv, duration_s: 1}",
            "profile: a replay takes lengths from its trace",
        ),
        ("[1, 2]", "no load test profile"),
        ("", "no load test profile"),
        ("a: [", "is not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(CommandError) as caught:
        profile(tmp_path, text)
    assert told in str(caught.value)


def test_a_missing_file_names_what_there_is() -> None:
    with pytest.raises(CommandError, match="quick, replay, sweep, swing"):
        load_profile("nowhere.yaml")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    loaded = profile(
        tmp_path,
        "prompts: {kind: generated}\nload: {kind: replay, trace: t.csv, duration_s: 1}\n",
    )
    assert loaded.load.kind == "replay"
    assert loaded.load.trace == tmp_path / "t.csv"


ARMS = "arms: [{name: a}, {name: b}, {name: c}]\nrepeats: 4\n"


def test_arms_take_turns_in_an_order_from_the_seed(tmp_path: Path) -> None:
    loaded = profile(tmp_path, GOOD + ARMS)
    cells = plan_cells(loaded)
    assert cells == plan_cells(loaded)
    assert [cell.index for cell in cells] == list(range(4 * 2 * 3))
    rounds = [cells[start : start + 3] for start in range(0, len(cells), 3)]
    orders = [tuple(cell.arm.name for cell in each) for each in rounds]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 1, "always the same order"
    for each in rounds:
        assert len({(cell.level, cell.first_request) for cell in each}) == 1, "other requests"
    assert len({each[0].first_request for each in rounds}) == len(rounds)


def test_arms_of_an_open_level_get_the_same_arrivals(tmp_path: Path) -> None:
    text = "prompts: {kind: generated}\nload: {kind: open, rate: [3, 3], duration_s: 9}\n"
    cells = plan_cells(profile(tmp_path, text + "arms: [{name: a}, {name: b}]\n"))
    offers = [cell.level.offer for cell in cells]
    assert all(isinstance(offer, OpenOffer) for offer in offers)
    assert offers[0] == offers[1] != offers[2] == offers[3]
