"""Sampling fields reach the verifier as the client meant them."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.types import SamplingParams
from router.tokenizer import Tokenizer
from tests.router.deployment import deploy
from tests.support.scripted_verifier import ScriptedVerifier, make_card, saying

TOKENIZER = Tokenizer(make_card())


def ids_of(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text, add_special_tokens=False)


async def submitted(**fields: Any) -> SamplingParams:
    """What the verifier was asked for."""
    requests = []

    def script(request: Any) -> Any:
        requests.append(request)
        return saying("ok")(request)

    async with deploy(ScriptedVerifier(script)) as deployment:
        response = await deployment.chat(**fields)
        assert response.status_code == 200, response.text
    [request] = requests
    return request.sampling


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"presence_penalty": 0.5, "frequency_penalty": -2}, None),
        ({"repetition_penalty": 1.3, "min_p": 0.05}, None),
        ({"temperature": 0, "min_tokens": 4, "max_tokens": 9}, {"temperature": 0, "min_tokens": 4}),
        ({"logit_bias": {"7": -100, "3": 2.5}}, {"logit_bias": ((3, 2.5), (7, -100.0))}),
        ({"top_k": -1}, {"top_k": 0}),
    ],
)
async def test_fields_are_passed_on(
    fields: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    """Where nothing else is expected, they keep their names and values."""
    expected = fields if expected is None else expected
    assert await submitted(**fields) == SamplingParams(**expected)


async def test_bad_words_are_banned_at_the_start_and_within_a_text() -> None:
    sampling = await submitted(bad_words=["fox", " dog"])
    expected = {ids_of("fox"), ids_of(" fox"), ids_of("dog"), ids_of(" dog")}
    assert set(sampling.bad_words) == expected


@pytest.mark.parametrize("size", [1, 3, 16])
async def test_stop_strings_end_nothing_before_min_tokens(size: int) -> None:
    """min_tokens counts tokens, whatever blocks they come in."""
    text = "END of the END of it"
    num_first = len(ids_of("END of"))
    async with deploy(ScriptedVerifier(saying(text, size))) as deployment:
        whole = await deployment.chat(stop=["END"], min_tokens=num_first)
        assert whole.json()["choices"][0]["message"]["content"] == "END of the "
        whole = await deployment.chat(stop=["END"])
        assert whole.json()["choices"][0]["message"]["content"] == ""
