"""Scenario files: what is refused says why and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.simulation.scenario import Scenario, load_scenario, shipped_scenarios
from cluster import cli
from cluster.commands.command_error import CommandError
from tests.benchmarks.simulation.scenarios import tiny
from tests.support.tiny_models import make_tiny_model


def written(folder: Path, **changes: Any) -> str:
    """Path of the tiny scenario with other top-level fields."""
    content = {**tiny().model_dump(mode="json", exclude_unset=True), **changes}
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_a_file_gives_the_scenario_it_was_made_of(tmp_path: Path) -> None:
    assert load_scenario(written(tmp_path)) == tiny()


@pytest.mark.parametrize("name", shipped_scenarios())
def test_shipped_scenarios_are_valid_and_say_what_they_are(name: str) -> None:
    assert load_scenario(name).description
    assert load_scenario(name).verifiers.table


def test_the_issue_s_sizes_are_shipped() -> None:
    hour, thousand = load_scenario("hour"), load_scenario("thousand")
    assert (hour.verifiers.count, hour.drafters.count, hour.duration_s) == (20, 5, 3_600)
    assert (thousand.verifiers.count, thousand.drafters.count, thousand.duration_s) == (
        1_000,
        250,
        30,
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"durration_s": 1}, "durration_s"),
        ({"verifiers": {"count": 1, "step_ms": {1: 5}, "kv": 3}}, "verifiers.kv"),
        ({"verifiers": {"count": 0, "step_ms": {1: 5}}}, "verifiers.count"),
        ({"verifiers": {"count": 1}}, "step_ms or profile"),
        ({"verifiers": {"count": 1, "step_ms": {1: 5}, "kv_tokens": 20}}, "verifiers.kv_tokens"),
        ({"traffic": {"chat": {"acceptance": [1.2]}}}, "traffic.chat.acceptance.0"),
        ({"traffic": {}}, "traffic"),
        ({"load": {"kind": "rate", "rate": []}}, "load.rate.rate"),
        (
            {"load": {"kind": "rate", "rate": [{"at_s": 5, "per_s": 1}, {"at_s": 5, "per_s": 2}]}},
            "at_s must rise",
        ),
        ({"load": {"kind": "rate", "rate": [{"at_s": 0, "per_s": 1}], "cv": 2}}, "cv"),
        ({"warmup_s": 10}, "warmup_s"),
        ({"arms": [{"name": "a", "mode": "on"}, {"name": "a", "mode": "off"}]}, "arms"),
        (
            {
                "drafters": {
                    "count": 1,
                    "scaling": {
                        "policy_function": "cluster.autoscaling:Nothing",
                        "policy_kwargs": {},
                        "max_replicas": 2,
                    },
                }
            },
            "drafters.scaling",
        ),
    ],
)
def test_a_bad_file_names_the_key(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CommandError) as told:
        load_scenario(written(tmp_path, **changes))
    assert named in str(told.value)
    assert "scenario.yaml" in str(told.value)


def test_a_name_that_is_none_shows_those_there_are() -> None:
    with pytest.raises(CommandError, match="hour, swing"):
        load_scenario("no_such_scenario")


def test_a_table_comes_from_what_paceline_profile_writes(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    model = str(make_tiny_model(tmp_path / "tiny"))
    assert cli.main(["profile", "--model", model, "--out", str(out)]) == 0
    measured = json.loads(out.read_text())["step_ms"]["0"]
    path = written(tmp_path, verifiers={"count": 1, "profile": "profile.json"})
    table = load_scenario(path).verifiers.table
    assert table == {int(tokens): ms for tokens, ms in measured.items()}
    assert len(table) > 3


def test_a_profile_that_is_none_says_how_to_make_one(tmp_path: Path) -> None:
    path = written(tmp_path, verifiers={"count": 1, "profile": "profile.json"})
    with pytest.raises(CommandError, match="paceline profile --out"):
        load_scenario(path)


def test_every_field_is_documented() -> None:
    undocumented = []

    def look(schema: dict[str, Any], where: str) -> None:
        for name, field in schema.get("properties", {}).items():
            if "description" not in field and "const" not in field:
                undocumented.append(f"{where}.{name}")

    schema = Scenario.model_json_schema()
    look(schema, "Scenario")
    for name, inner in schema["$defs"].items():
        look(inner, name)
    assert not undocumented
