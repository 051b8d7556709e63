"""Whatever the schema allows either renders to something valid or is refused in words of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, event, given, settings

from tests.helm.chart import RenderError, render
from tests.helm.drawn_values import values
from tests.helm.kuberay_rules import problems
from tests.helm.pods import builtin_manifests, invalid
from tests.helm.rayservice_schema import RAY_SERVICE

VALIDATOR = jsonschema.Draft202012Validator(RAY_SERVICE)
OURS = ("execution error at", "values don't meet the specifications of the schema")
COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def look_at(helm: Path, drawn: dict[str, Any]) -> None:
    try:
        rendered = render(helm, drawn)
    except RenderError as error:
        event("refused")
        if not any(words in str(error) for words in OURS):
            raise
        return
    event("rendered")
    assert list(VALIDATOR.iter_errors(rendered.ray_service)) == []
    assert problems(rendered.ray_service) == []
    own = [one for one in builtin_manifests(rendered) if one not in drawn.get("extraObjects", [])]
    assert [problem for one in own if (problem := invalid(one, "1.34"))] == []


@settings(max_examples=15, derandomize=True, **COMMON)
@given(drawn=values())
def test_a_few_drawn_values(helm: Path, drawn: dict[str, Any]):
    look_at(helm, drawn)


@pytest.mark.long
@settings(max_examples=300, **COMMON)
@given(drawn=values())
def test_many_drawn_values(helm: Path, drawn: dict[str, Any]):
    look_at(helm, drawn)
