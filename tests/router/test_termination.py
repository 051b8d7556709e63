"""Ends inside a block: end of sequence, stop strings, length. Stream and whole reply agree."""

from __future__ import annotations

from typing import Any

import pytest

from router.tokenizer import Tokenizer
from tests.router.deployment import Deployment, deploy
from tests.router.sse import chat_text, events, finish_reasons
from tests.support.polling import eventually
from tests.support.scripted_verifier import ScriptedVerifier, Step, blocks, make_card, saying

CARD = make_card()
TOKENIZER = Tokenizer(CARD)
EOS = CARD.eos_token_ids[0]


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


async def both_ways(deployment: Deployment, **fields: Any) -> tuple[str, str, int]:
    """(text, finish reason, completion tokens), the same streamed and whole."""
    whole = (await deployment.chat(**fields)).json()
    choice = whole["choices"][0]
    result = (
        choice["message"]["content"],
        choice["finish_reason"],
        whole["usage"]["completion_tokens"],
    )
    options = {"include_usage": True}
    streamed = await deployment.chat(stream=True, stream_options=options, **fields)
    *chunks, usage, done = events(streamed.text)
    assert done == "[DONE]"
    assert (chat_text(chunks), *finish_reasons(chunks)) == result[:2]
    assert chunks[-1]["choices"][0]["finish_reason"] is not None
    assert usage["usage"]["completion_tokens"] == result[2]
    return result


@pytest.mark.parametrize("place", range(7))
async def test_end_of_sequence_anywhere_in_a_block(place: int) -> None:
    letters = ids_of("xyzuvw")
    block = [*letters[:place], EOS, *letters[place:]]
    script = lambda request: [Step(tuple(block), len(block) - 1)]  # noqa: E731
    async with deploy(ScriptedVerifier(script)) as deployment:
        assert await both_ways(deployment) == ("xyzuvw"[:place], "stop", place + 1)


async def test_stop_string_at_the_start_of_a_long_block() -> None:
    block = ids_of("END" + "filler " * 5)
    async with deploy(ScriptedVerifier(lambda r: blocks(block, 16))) as deployment:
        assert await both_ways(deployment, stop=["END"]) == ("", "stop", len(ids_of("END")))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
async def test_stop_strings_over_block_borders(size: int) -> None:
    async with deploy(ScriptedVerifier(saying("say WHEN or not", size))) as deployment:
        for stop, text in (
            ("WHEN", "say "),
            ("n or", "say WHEN or not"),
            (["not", "HEN"], "say W"),
            ("nothing", "say WHEN or not"),
        ):
            seen, reason, _ = await both_ways(deployment, stop=stop)
            assert (seen, reason) == (text, "stop")
        await eventually(lambda: deployment.is_idle)


async def test_usage_counts_up_to_the_token_that_completed_the_stop() -> None:
    async with deploy(ScriptedVerifier(saying("uvwxyz", 6))) as deployment:
        assert await both_ways(deployment, stop="wx") == ("uv", "stop", 4)


async def test_stop_before_length() -> None:
    block = (*ids_of("uv"), *ids_of("w"), *ids_of("xyz"))
    async with deploy(ScriptedVerifier(lambda r: [Step(block, 5)])) as deployment:
        assert await both_ways(deployment, max_tokens=5, stop="w") == ("uv", "stop", 3)
        assert await both_ways(deployment, max_tokens=5, stop="z") == ("uvwxy", "length", 5)
        stop_id = ids_of("w")[0]
        by_id = await both_ways(deployment, max_tokens=5, stop_token_ids=[stop_id])
        assert by_id == ("uv", "stop", 3)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_exactly_max_tokens(max_tokens: int) -> None:
    block = ids_of("zzzzzzzzz")
    async with deploy(ScriptedVerifier(lambda r: [Step(tuple(block), 8)])) as deployment:
        expected = ("z" * max_tokens, "length", max_tokens)
        assert await both_ways(deployment, max_tokens=max_tokens) == expected


async def test_without_max_tokens_up_to_the_end_of_the_window() -> None:
    block = tuple(ids_of("z") * 1000)
    async with deploy(ScriptedVerifier(lambda r: blocks(block, 50))) as deployment:
        reply = (await deployment.chat()).json()
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["total_tokens"] == CARD.max_model_len


@pytest.mark.parametrize(("left", "status"), [(2, 200), (1, 200), (0, 400), (-1, 400)])
async def test_without_max_tokens_a_prompt_near_the_window_is_served_or_refused(
    left: int, status: int
) -> None:
    """Elsewhere the default was computed from a window that drafts had been added to."""
    prompt = ids_of("z") * (CARD.max_model_len - left)
    block = tuple(ids_of("z") * 9)
    async with deploy(ScriptedVerifier(lambda r: [Step(block, 8)])) as deployment:
        for mode in ("on", "off"):
            response = await deployment.complete(prompt, speculation={"mode": mode})
            assert response.status_code == status, response.text
            if status == 200:
                assert response.json()["usage"]["completion_tokens"] == left
                assert response.json()["choices"][0]["finish_reason"] == "length"
        assert (await deployment.complete("hi")).status_code == 200
        await eventually(lambda: deployment.is_idle)


async def test_only_delivered_tokens_are_counted_as_accepted() -> None:
    block = (*ids_of("uv"), EOS, *ids_of("xy"))
    async with deploy(ScriptedVerifier(lambda r: [Step(block, 4)])) as deployment:
        reply = (await deployment.chat()).json()
        assert reply["usage"]["completion_tokens"] == 3
        assert reply["speculation"]["num_accepted_tokens"] == 3
        assert reply["speculation"]["num_draft_tokens"] == 4
        assert reply["speculation"]["num_steps"] == 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
async def test_emoji_over_block_borders(size: int) -> None:
    async with deploy(ScriptedVerifier(saying("a🙂é—b🇨🇭", size))) as deployment:
        seen, reason, _ = await both_ways(deployment)
        assert (seen, reason) == ("a🙂é—b🇨🇭", "stop")


async def test_a_special_token_as_stop_string_stops_at_its_id() -> None:
    special = TOKENIZER.special_ids["<|endoftext|>"]
    block = (*ids_of("uv"), special, *ids_of("xy"))
    async with deploy(ScriptedVerifier(lambda r: [Step(block, 4)])) as deployment:
        assert await both_ways(deployment, stop="<|endoftext|>") == ("uv", "stop", 3)


async def test_ignore_eos_goes_on_and_shows_nothing_of_it() -> None:
    block = (*ids_of("uv"), EOS, *ids_of("xy"))
    async with deploy(ScriptedVerifier(lambda r: [Step(block, 4)])) as deployment:
        seen = await both_ways(deployment, ignore_eos=True, max_tokens=5)
        assert seen == ("uvxy", "length", 5)


async def test_a_generation_without_text_has_one_chunk() -> None:
    async with deploy(ScriptedVerifier(lambda r: [Step((EOS,))])) as deployment:
        assert await both_ways(deployment) == ("", "stop", 1)
