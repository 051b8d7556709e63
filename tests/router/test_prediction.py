"""A client's prediction, and the drafter that it asks for, at the router: what reaches the
verifier, as which tokens, and what the reply says."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.load import LocalDrafterLoad, VerifierLoad
from cluster.types import DraftRun, GenerationRequest, Path
from router.choice import SpeculationTally
from router.tokenizer import Tokenizer
from tests.router.deployment import Deployment, deploy
from tests.support.polling import eventually
from tests.support.scripted_verifier import (
    ScriptedVerifier,
    make_card,
    saying,
    sentencepiece_tokenizer_json,
)

CARD = make_card()
TOKENIZER = Tokenizer(CARD)


def content(value: Any) -> dict[str, Any]:
    return {"type": "content", "content": value}


async def submitted(deployment: Deployment, **fields: Any) -> GenerationRequest:
    response = await deployment.chat(**fields)
    assert response.status_code == 200, response.text
    return deployment.verifier.submitted[-1]


async def test_a_prediction_reaches_the_verifier_as_the_model_would_write_it() -> None:
    async with deploy(ScriptedVerifier(saying("ok"))) as deployment:
        expected = TOKENIZER.encode("the quick fox", add_special_tokens=False)
        for value in (
            "the quick fox",
            [{"type": "text", "text": "the qui"}, {"type": "text", "text": "ck fox"}],
        ):
            request = await submitted(deployment, prediction=content(value))
            assert request.prediction_ids == expected
        response = await deployment.complete("the", prediction=content(" quick fox"), n=2)
        assert response.status_code == 200, response.text
        for request in deployment.verifier.submitted[-2:]:
            assert request.prediction_ids == TOKENIZER.encode(
                " quick fox", add_special_tokens=False
            )
        for value in (None, content(""), content([])):
            assert (await submitted(deployment, prediction=value)).prediction_ids == ()


@pytest.mark.parametrize(
    ("speculation", "used"),
    [
        (None, True),
        ({"mode": "auto"}, True),
        ({"mode": "on"}, True),
        ({"mode": "off"}, False),
        ({"drafter": "auto"}, True),
        ({"drafter": "prediction"}, True),
        ({"drafter": "suffix"}, False),
        ({"mode": "off", "drafter": "prediction"}, False),
    ],
)
async def test_it_is_drafted_from_unless_the_request_says_otherwise(
    speculation: Any, used: bool
) -> None:
    async with deploy(ScriptedVerifier(saying("ok"))) as deployment:
        request = await submitted(
            deployment, prediction=content("the fox"), speculation=speculation
        )
        assert bool(request.prediction_ids) is used


words = st.text("the quick brown fox\n<|>_é", max_size=24)


@settings(max_examples=150, deadline=None)
@given(words, words)
def test_tokens_of_a_prediction_are_those_of_the_whole_text(before: str, text: str) -> None:
    """Where the prompt ends at the end of one of them; else those of the prediction alone."""
    together = TOKENIZER.encode(before + text, add_special_tokens=False)
    prompt = TOKENIZER.encode(before, add_special_tokens=False)
    predicted = TOKENIZER.encode_continuation(prompt, text)
    assert TOKENIZER.decode(predicted) == text
    assert not set(predicted) & set(TOKENIZER.special_ids.values())
    if together[: len(prompt)] == prompt and len(prompt) <= 32:
        assert predicted == together[len(prompt) :]


def test_a_word_behind_a_special_token_is_cut_as_at_the_start() -> None:
    prompt = (TOKENIZER.special_ids["<|im_start|>"],)
    assert TOKENIZER.encode_continuation(prompt, " the") == TOKENIZER.encode(
        " the", add_special_tokens=False
    )
    other = Tokenizer(make_card(tokenizer_json=sentencepiece_tokenizer_json()))
    assert other.decode(other.encode_continuation((), "ab")) == "ab"


async def test_a_prediction_longer_than_the_models_window_is_refused() -> None:
    async with deploy(ScriptedVerifier(saying("ok"))) as deployment:
        fits = "x" * CARD.max_model_len
        assert len((await submitted(deployment, prediction=content(fits))).prediction_ids) == 512
        for mode in ("on", "off"):
            response = await deployment.chat(
                prediction=content(fits + "x"), speculation={"mode": mode}
            )
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "prediction.content"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "content", "text", "x"]),
            inner | st.just("content"),
            max_size=4,
        )
    ),
    max_leaves=8,
)


async def test_any_json_as_a_prediction_is_taken_or_refused_by_name() -> None:
    async with deploy(ScriptedVerifier(saying("ok"))) as deployment:
        statuses = set()

        async def check(value: Any) -> None:
            response = await deployment.chat(prediction=value)
            statuses.add(response.status_code)
            assert response.status_code in (200, 400), response.text
            if response.status_code == 400:
                assert response.json()["error"]["param"].startswith("prediction"), response.text

        async def run_all() -> None:
            for value in values:
                await check(value)

        values: list[Any] = [content("x"), None, 5, [], {}, content([{"type": "text"}])]

        @settings(max_examples=80, deadline=None, database=None)
        @given(json_values.filter(is_json))
        def gather(value: Any) -> None:
            values.append(value)

        gather()
        await run_all()
        assert statuses == {200, 400}
        assert deployment.is_idle


def is_json(value: Any) -> bool:
    """NaN and the like are no JSON; the body as a whole is refused for them."""
    try:
        httpx.Request("POST", "http://x", json=value)
    except ValueError:
        return False
    return True


# --- the drafter that is asked for --------------------------------------------------------------


def local(*kinds: str) -> VerifierLoad:
    drafters = tuple(LocalDrafterLoad(kind) for kind in ("prediction", *kinds))
    return VerifierLoad(kv_blocks_total=64, local_drafters=drafters)


async def replied(deployment: Deployment, **fields: Any) -> dict[str, Any]:
    response = await deployment.chat(**fields)
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()["speculation"]
    return told


async def test_drafters_inside_the_verifier_are_means_enough_to_speculate() -> None:
    verifier = ScriptedVerifier(saying("ok"))
    verifier.load = local("suffix")
    async with deploy(verifier) as deployment:
        await eventually(lambda: deployment.service.policy.mode is Path.SPECULATIVE)
        assert (await replied(deployment))["path"] == "speculative"
        verifier.load = local()
        await eventually(lambda: deployment.service.policy.mode is Path.PLAIN)
        assert "0 of 0 drafters are ready" in (await replied(deployment))["reason"]


@pytest.mark.parametrize("mode", ["auto", "on"])
async def test_a_kind_that_is_nowhere_goes_plain_and_says_why(mode: str) -> None:
    verifier = ScriptedVerifier(saying("ok"))
    verifier.load = local("suffix")
    async with deploy(verifier) as deployment:
        await eventually(lambda: deployment.service.policy.mode is Path.SPECULATIVE)
        told = await replied(deployment, speculation={"mode": mode, "drafter": "ngram"})
        assert told["path"] == "plain"
        assert told["reason"] == "no ngram drafter is ready (kinds that are: prediction, suffix)"
        told = await replied(deployment, speculation={"mode": mode, "drafter": "suffix"})
        assert told["path"] == "speculative"
        told = await replied(deployment, speculation={"mode": mode, "drafter": "prediction"})
        assert told["path"] == "plain"
        assert "the request has none" in told["reason"]


async def test_a_kind_of_a_drafter_replica_is_known() -> None:
    verifier = ScriptedVerifier(saying("ok"))
    verifier.ready_drafter("model")
    async with deploy(verifier) as deployment:
        await eventually(lambda: deployment.service.policy.mode is Path.SPECULATIVE)
        told = await replied(deployment, speculation={"drafter": "model"})
        assert told["path"] == "speculative"
        assert deployment.verifier.submitted[-1].drafter == "model"


def test_the_drafter_of_a_reply_is_the_one_of_which_most_was_accepted() -> None:
    tally = SpeculationTally()
    assert tally.drafter == ""
    tally.last_drafter = "scripted"
    assert tally.drafter == "scripted"
    tally.add_drafters((DraftRun("suffix", 2), DraftRun("model", 3)), 3)
    tally.add_drafters((DraftRun("model", 3),), 3)
    tally.add_drafters((DraftRun("ngram", 4),), 0)
    assert tally.drafter == "model"
    assert tally.drafted_by == {"suffix": 2, "model": 6, "ngram": 4}
    assert tally.accepted_by == {"suffix": 2, "model": 4, "ngram": 0}
