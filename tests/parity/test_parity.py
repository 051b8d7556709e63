"""Nothing that a client can ask for is another with drafts than without: the whole answer is equal,
whoever drafts, whatever is drafted, and however deep."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cluster.config import EMBEDDED_MODEL
from tests.parity.combinations import REQUESTS, Fields, Request
from tests.parity.replies import Reply, comparable, joined, whole_choices
from tests.parity.script import Script
from tests.parity.systems import System, model_drafter, system
from tests.support.scripted_drafter import ScriptedDrafter, noise, nothing
from tests.support.tiny_models import make_tiny_model

MAX_SESSIONS = 1024
MAX_ATTEMPTS = 20
DEPTHS = (1, 2, 3, 5, 8)
NUM_BEYOND = 12
"""Tokens behind an answer's end that may be drafted as if it went on."""
OFF: Fields = {"speculation": {"mode": "off"}}


def on(drafter: str = "model", **fields: object) -> Fields:
    return {"speculation": {"mode": "on", "drafter": drafter, **fields}}


def test_the_table_is_large_and_says_nothing_twice():
    assert len(REQUESTS) >= 60
    assert len({repr(request[1:]) for request in REQUESTS}) == len(REQUESTS)


@pytest.fixture
def tiny_model(tmp_path):
    return str(make_tiny_model(tmp_path / "tiny", seed=8, max_position_embeddings=2048))


async def test_every_answer_is_equal_whatever_is_drafted_and_however_deep(tiny_model):
    drafter = ScriptedDrafter(kind="model", max_sessions=MAX_SESSIONS)
    async with drafter, system(tiny_model, "float32", drafter.member) as asked:
        arms = Arms(asked, REQUESTS, await answers(asked, REQUESTS, OFF))
        script = await learnt(asked, drafter, REQUESTS)

        drafter.answer = nothing
        assert counts(await arms.equal("nothing", on())) == (0, 0)

        drafter.answer = script.right
        for depth in DEPTHS:
            fields = on(num_speculative_tokens=depth)
            replies = await arms.equal_and_drafted(f"depth {depth}", fields)
            assert longest_draft(replies) == depth
        await arms.equal_streams("right", on())

        drafter.answer = script.nearly_right
        drafted, accepted = counts(await arms.equal("nearly right", on("auto")))
        assert drafted / 4 < accepted < drafted * 3 / 4

        drafter.answer = noise(100)
        drafted, accepted = counts(await arms.equal("garbage", on()))
        assert accepted < drafted / 20
        await arms.equal_streams("garbage", on())


async def test_every_answer_is_equal_whoever_drafts(tiny_model):
    async with (
        model_drafter(tiny_model, "float32") as drafter,
        system(tiny_model, "float32", drafter) as asked,
    ):
        arms = Arms(asked, REQUESTS, await answers(asked, REQUESTS, OFF))
        await arms.equal_streams("plain", OFF)
        await all_drafters(arms)


@pytest.mark.long
@pytest.mark.alone
async def test_every_answer_of_the_embedded_model_is_equal_whoever_drafts():
    async with (
        model_drafter(EMBEDDED_MODEL, "auto") as drafter,
        system(EMBEDDED_MODEL, "auto", drafter) as asked,
    ):
        arms = Arms(asked, REQUESTS, await answers(asked, REQUESTS, OFF))
        await all_drafters(arms)


async def all_drafters(arms: Arms) -> None:
    replies = await arms.equal("model", on())
    drafted, accepted = counts(replies)
    # It knows nothing of grammars, so it is not always right. How much it drafts depends on how
    # soon its sessions are open: these answers are short.
    assert accepted >= drafted / 2

    assert counts(await arms.equal("ngram", on("ngram")))[1] > 100

    learning = counts(await arms.equal("suffix", on("suffix")))
    # Again under the same salts: now it knows the answers, and their prompts are cached.
    remembering = counts(await arms.equal_choices("suffix", on("suffix")))
    assert remembering[1] > learning[1] + 500

    replies = await arms.equal("prediction", on("prediction"), predictions=True)
    # Every tenth character is wrong: of a large vocabulary's tokens nearly every second.
    assert counts(replies)[1] > 200


# --- asking -------------------------------------------------------------------------------------


class Arms:
    """Asks the same requests in other ways, and compares with the plain answers."""

    def __init__(
        self, asked: System, requests: Sequence[Request], expected: Sequence[Reply]
    ) -> None:
        self._asked = asked
        self._requests = requests
        self._expected = expected

    async def equal(self, arm: str, fields: Fields, *, predictions: bool = False) -> list[Reply]:
        """Every answer, whole."""
        requests = self._predicted() if predictions else self._requests
        replies = await answers(self._asked, requests, fields, arm)
        for name, reply, right in self._beside(replies):
            assert comparable(reply) == comparable(right), f"{name}, {arm}"
        return replies

    async def equal_and_drafted(self, arm: str, fields: Fields) -> list[Reply]:
        """Every answer, whole, and drafts were accepted for each that left time for one. Some are
        over before their session is open: they are asked for again."""
        replies = await self.equal(arm, fields)
        for attempt in range(MAX_ATTEMPTS):
            undrafted = [place for place, reply in enumerate(replies) if lacks_drafts(reply)]
            if not undrafted:
                return replies
            again = Arms(
                self._asked,
                [self._requests[place] for place in undrafted],
                [self._expected[place] for place in undrafted],
            )
            asked_again = await again.equal(f"{arm}, again {attempt}", fields)
            for place, reply in zip(undrafted, asked_again, strict=True):
                replies[place] = reply
        raise AssertionError([self._requests[place][0] for place in undrafted])

    async def equal_choices(self, arm: str, fields: Fields) -> list[Reply]:
        """Every answer but for its usage."""
        replies = await answers(self._asked, self._requests, fields, arm)
        for name, reply, right in self._beside(replies):
            assert whole_choices(reply) == whole_choices(right), f"{name}, {arm}"
        return replies

    async def equal_streams(self, arm: str, fields: Fields) -> None:
        """What the chunks of each stream add up to."""
        streams = await asyncio.gather(
            *(
                self._asked.stream(path, salted(f"{arm}, streamed", name, request | fields))
                for name, path, request in self._requests
            )
        )
        for name, chunks, right in self._beside(streams):
            assert joined(chunks) == whole_choices(right), f"{name}, {arm}, streamed"
            usage = comparable({"choices": [], "usage": chunks[-1]["usage"]})["usage"]
            assert usage == comparable(right)["usage"], f"{name}, {arm}, streamed"

    def _beside(self, told: Sequence[Any]) -> Iterator[tuple[str, Any, Reply]]:
        names = [name for name, _, _ in self._requests]
        return zip(names, told, self._expected, strict=True)

    def _predicted(self) -> list[Request]:
        """The requests with their answers as predictions, every tenth character another."""
        requests = []
        for (name, path, fields), right in zip(self._requests, self._expected, strict=True):
            text = list(whole_choices(right)[0]["text"])
            text[9::10] = "#" * len(text[9::10])
            content = {"type": "content", "content": "".join(text)}
            requests.append((name, path, fields | {"prediction": content}))
        return requests


async def answers(
    asked: System, requests: Sequence[Request], fields: Fields, arm: str = "plain"
) -> list[Reply]:
    """All at once."""
    return await asyncio.gather(
        *(asked.ask(path, salted(arm, name, own | fields)) for name, path, own in requests)
    )


def salted(arm: str, name: str, fields: Fields) -> Fields:
    """With a salt of its own: else cached_tokens tells which of two requests came first."""
    return fields | {"cache_salt": f"{arm}, {name}"}


async def learnt(asked: System, drafter: ScriptedDrafter, requests: Sequence[Request]) -> Script:
    """Knows how all answers go on, beyond their ends too."""
    script = Script()
    drafter.answer = script.watch
    await answers(asked, [(name, path, unended(own)) for name, path, own in requests], on())
    return script


def unended(fields: Fields) -> Fields:
    kept = {key: value for key, value in fields.items() if key not in ("stop", "stop_token_ids")}
    return kept | {"max_tokens": fields["max_tokens"] + NUM_BEYOND}


# --- what speculation did -----------------------------------------------------------------------


def counts(replies: Sequence[Reply]) -> tuple[int, int]:
    """Drafted, accepted."""
    spent = [reply["speculation"] for reply in replies]
    return (
        sum(one["num_draft_tokens"] for one in spent),
        sum(one["num_accepted_tokens"] for one in spent),
    )


def longest_draft(replies: Sequence[Reply]) -> int:
    return max(len(reply["speculation"]["acceptance_per_position"]) for reply in replies)


def lacks_drafts(reply: Reply) -> bool:
    """No draft was accepted, though the answer left time for one."""
    is_long = reply["usage"]["completion_tokens"] / len(reply["choices"]) > 10
    return is_long and not reply["speculation"]["num_accepted_tokens"]
