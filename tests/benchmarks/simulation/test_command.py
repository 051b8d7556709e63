"""`paceline simulate` as it is typed."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from benchmarks.simulation.results import Results
from cluster.cli import main
from tests.benchmarks.simulation.scenarios import tiny


@pytest.fixture
def file(tmp_path: Path) -> Path:
    scenario = tiny(
        verifiers={
            "scaling": {
                "policy_kwargs": {"metrics": ["running", "waiting"], "target": 1},
                "max_replicas": 3,
                "look_back_period_s": 1,
                "upscale_delay_s": 1,
                "start_s": 1,
            }
        }
    )
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(scenario.model_dump(mode="json", exclude_unset=True)))
    return path


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_it_prints_a_table_and_writes_a_report(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["simulate", str(file), "--out", str(out)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:4]] == ["auto", "always on", "always off"]
    assert lines[-1] == str(out / "report.html")

    results = Results.model_validate_json((out / "results.json").read_text())
    assert results.scenario["verifiers"]["count"] == 2
    assert max(results.arms[0].timeline.verifiers) == 3

    page = _Page()
    page.feed((out / "report.html").read_text())
    assert page.tags.count("figure") >= 4
    assert "script" not in page.tags
    assert not page.links


def test_seed_and_arm_go_before_the_file(file: Path, tmp_path: Path) -> None:
    arguments = [
        "simulate",
        str(file),
        "--out",
        str(tmp_path),
        "--seed",
        "7",
        "--arm",
        "always off",
    ]
    assert main(arguments) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["scenario"]["seed"] == 7
    assert [arm["name"] for arm in found["arms"]] == ["always off"]


def test_what_is_wrong_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(file), "--arm", "sometimes"]) == 1
    assert "always off" in capsys.readouterr().err
    assert main(["simulate", "no_such_file.yaml"]) == 1
    assert "no_such_file.yaml" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["simulate"])
    assert ended.value.code == 2


def test_the_list_names_the_shipped_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list"]) == 0
    assert {"hour", "swing", "this_machine", "thousand"} <= set(capsys.readouterr().out.split())
