"""Scenarios that take milliseconds."""

from __future__ import annotations

from typing import Any

from benchmarks.simulation.scenario import Scenario

FLAT = {1: 40.0, 4096: 40.0}
"""A step takes the same whatever it holds."""


def tiny(**changes: Any) -> Scenario:
    """Two verifiers and a drafter for ten seconds; sections given are merged into it."""
    content: dict[str, Any] = {
        "duration_s": 10.0,
        "traffic": {
            "chat": {
                "acceptance": [0.7],
                "prompt_tokens": {"low": 16, "high": 48},
                "output_tokens": {"low": 8, "high": 40},
            }
        },
        "load": {"kind": "rate", "rate": [{"at_s": 0, "per_s": 6}]},
        "verifiers": {
            "count": 2,
            "step_ms": {1: 40, 16: 44, 64: 90},
            "scheduler": {"max_prefill_chunk_tokens": 64},
            "num_speculative_tokens": 4,
        },
        "drafters": {"count": 1, "token_ms": {1: 1, 64: 2}},
        "slo": {"ttft_ms": 500, "tpot_ms": 60},
    }
    for name, change in changes.items():
        if isinstance(change, dict) and isinstance(content.get(name), dict) and name != "load":
            change = {**content[name], **change}
        content[name] = change
    return Scenario.model_validate(content)
