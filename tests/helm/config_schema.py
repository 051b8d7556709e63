"""Puts the schema of cluster/config.py into helm/values.schema.json, so that a wrong `args` is
refused before it reaches a cluster: python -m tests.helm.config_schema

The rest of that file is written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from cluster.config import DrafterConfig, RouterConfig, VerifierConfig
from router.api_keys import KeyEntry

SCHEMA = Path(__file__).parents[2] / "helm" / "values.schema.json"


def config_definitions() -> dict[str, Any]:
    """One definition for each section, by the name of its class."""
    models = (RouterConfig, VerifierConfig, DrafterConfig, KeyEntry)
    _, schema = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/definitions/{model}"
    )
    definitions: dict[str, Any] = _without_titles(schema["$defs"])
    return definitions


def with_config(schema: dict[str, Any]) -> dict[str, Any]:
    """The values schema with the current configuration in it."""
    by_hand = {
        name: value for name, value in schema["definitions"].items() if not name[0].isupper()
    }
    return schema | {"definitions": by_hand | config_definitions()}


def _without_titles(value: Any) -> Any:
    """pydantic's titles repeat the names. A field that is called title is no title."""
    if isinstance(value, list):
        return [_without_titles(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_titles(item)
        for key, item in value.items()
        if key != "title" or not isinstance(item, str)
    }


if __name__ == "__main__":
    updated = with_config(json.loads(SCHEMA.read_text()))
    SCHEMA.write_text(json.dumps(updated, indent=2) + "\n")
