"""Models are brought into the cache ahead of the replicas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from engine import loader, prefetch
from engine.decoder import UnsupportedModelError


def test_each_model_is_where_a_replica_looks(capsys, monkeypatch, tmp_path: Path):
    asked = []

    def download(hub_id: str, revision: str | None) -> Path:
        asked.append((hub_id, revision))
        return tmp_path

    monkeypatch.setattr(loader, "_download", download)
    (tmp_path / "local").mkdir()
    models = [
        {"source": "Qwen/Qwen3-32B", "revision": "abc", "device": "cuda", "dtype": "bfloat16"},
        {"source": str(tmp_path / "local")},
    ]
    prefetch.main([json.dumps(model) for model in models])
    assert asked == [("Qwen/Qwen3-32B", "abc")]
    assert capsys.readouterr().out.split("\n") == [
        f"Qwen/Qwen3-32B is in {tmp_path}",
        f"{tmp_path / 'local'} is in {tmp_path / 'local'}",
        "",
    ]


def test_nothing_is_fetched_if_one_is_wrong(monkeypatch):
    monkeypatch.setattr(loader, "_download", lambda *_: pytest.fail("fetched"))
    with pytest.raises(ValidationError, match="modle"):
        prefetch.main(['{"source": "Qwen/Qwen3-32B"}', '{"modle": "x"}'])


def test_what_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(UnsupportedModelError, match="there is no"):
        prefetch.main([json.dumps({"source": str(tmp_path / "none.gguf")})])
