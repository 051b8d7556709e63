"""Every operation of the OpenAPI document, fuzzed: what it promises is what comes, no error of ours
among it, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.clients.server import Served, served
from tests.support.polling import eventually
from tests.support.tiny_models import make_tiny_model

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
FEW_CASES = 12
MANY_FIELDS = ("POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize")
WINDOW = 96
"""So short that whatever is asked for is soon generated."""


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("fuzz") / "tiny", max_position_embeddings=WINDOW)


def operations(url: str) -> Iterator[APIOperation]:
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        yield found.ok()


def fuzz(
    system: Served, operation: APIOperation, mode: GenerationMode, num_cases: int
) -> Counter[int]:
    """How often each status was answered."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def run(case: Case, data: st.DataObject) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = _likely(case.body, system.model, data)
        response = case.call(base_url=system.url, timeout=60)
        case.validate_response(response, checks=CHECKS)
        statuses[response.status_code] += 1

    run()
    return statuses


def _likely(body: dict[str, Any], model: str, data: st.DataObject) -> dict[str, Any]:
    """Few fields of a body at once, the right model, and something in every message: of many random
    ones, one is always refused for what the document cannot say."""
    optional = sorted(body.keys() - {"model", "messages", "prompt", "tokens"})
    few = st.sets(st.sampled_from(optional), max_size=3) if optional else st.just(set())
    dropped = set(optional) - data.draw(few)
    kept = {name: value for name, value in body.items() if name not in dropped}
    for message in kept.get("messages") or ():
        message["content"] = message.get("content") or "hi"
    return kept | {"model": model} if "model" in kept else kept


def fuzz_all(system: Served, num_cases: int) -> dict[str, Counter[int]]:
    """Half of the cases follow the document, and half break it where it says anything."""
    found: dict[str, Counter[int]] = {}
    for operation in operations(system.url):
        modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
        statuses = [fuzz(system, operation, mode, num_cases // 2) for mode in modes]
        found[operation.label] = sum(statuses, Counter())
    return found


@pytest.mark.parametrize("num_cases", [FEW_CASES, pytest.param(500, marks=pytest.mark.long)])
async def test_no_request_makes_an_error_of_ours(num_cases: int, small_model: Path) -> None:
    async with served(small_model) as system:
        found = await asyncio.to_thread(fuzz_all, system, num_cases)
        for label, statuses in found.items():
            print(label, dict(statuses))
        assert len(found) >= 14
        for label in MANY_FIELDS if num_cases > FEW_CASES else ():
            assert found[label][200] > 0, "no case got through to what is behind the checks"
            assert found[label][400] > 0
        await eventually(lambda: system.router.admission.in_flight == 0)
        await eventually(lambda: system.router.pool.num_in_flight == 0)
