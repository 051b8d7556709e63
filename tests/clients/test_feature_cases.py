"""What other servers got wrong when features met speculation, asked over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.clients.server import served
from tests.support.polling import TIMEOUT_S

Json = dict[str, Any]
PROMPT = "one two one two"
DRAFTED: Json = {"speculation": {"mode": "on", "num_speculative_tokens": 4}}
PLAIN: Json = {"speculation": {"mode": "off"}}
ENOUGH: Json = {"max_tokens": 120, "ignore_eos": True, "temperature": 0}
"""The first tokens come before any draft."""


@asynccontextmanager
async def client_of(model: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with served(model) as system, httpx.AsyncClient(base_url=system.url, timeout=60) as http:
        yield http


async def ask(http: httpx.AsyncClient, path: str, body: Json) -> Json:
    """An answer is over in milliseconds, before its session is open if the machine is busy. Where
    drafts are wanted it is asked for again until they came."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            response = await http.post(path, json={"model": "tiny", **ENOUGH, **body})
            assert response.status_code == 200, response.text
            reply = response.json()
            if body.get("speculation", {}).get("mode") != "on" or accepted(reply):
                return reply


async def complete(http: httpx.AsyncClient, **fields: Any) -> Json:
    return await ask(http, "/v1/completions", {"prompt": PROMPT, **fields})


def accepted(reply: Json) -> int:
    return reply["speculation"]["num_accepted_tokens"]


async def both(http: httpx.AsyncClient, **fields: Any) -> Json:
    """The reply with drafts, whose choices are those without."""
    drafted = await complete(http, **fields, **DRAFTED)
    plain = await complete(http, **fields, **PLAIN)
    assert accepted(drafted) > 0 == accepted(plain)
    assert drafted["choices"] == plain["choices"]
    return drafted


async def test_every_token_of_a_block_has_its_own_logprob(model: Path) -> None:
    """Elsewhere: zero at every token, or right at the first only, or missing behind it."""
    async with client_of(model) as http:
        reply = await both(http, logprobs=3, seed=5, temperature=0.8)
        logprobs = reply["choices"][0]["logprobs"]
        count = reply["usage"]["completion_tokens"]
        assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == count
        assert all(value < 0 for value in logprobs["token_logprobs"])
        assert len(set(logprobs["token_logprobs"])) == count


async def test_logprobs_are_raw_under_a_penalty(model: Path) -> None:
    """Of the model's own distribution: those that scoring the answer gives, without the penalty."""
    id_of = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    async with client_of(model) as http:
        reply = await both(http, repetition_penalty=1.3, logprobs=1)
        told = reply["choices"][0]["logprobs"]
        prompt = (await http.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
        answer = [id_of[token] for token in told["tokens"]]
        scored = await complete(
            http, prompt=prompt + answer, echo=True, logprobs=1, max_tokens=0, ignore_eos=False
        )
        own = scored["choices"][0]["logprobs"]["token_logprobs"][len(prompt) :]
        assert own == told["token_logprobs"]


async def test_a_request_for_prompt_logprobs_among_others_harms_none(model: Path) -> None:
    async with client_of(model) as http:
        alone = [await complete(http, prompt=f"{i} {PROMPT}", **DRAFTED) for i in range(5)]
        asked = complete(http, echo=True, logprobs=2, **DRAFTED)
        others = [complete(http, prompt=f"{i} {PROMPT}", **DRAFTED) for i in range(5)]
        scored, *together = await asyncio.gather(asked, *others)
        assert [r["choices"] for r in together] == [r["choices"] for r in alone]
        logprobs = scored["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs[0] is None
        assert None not in logprobs[1:]


async def test_chat_logprobs_have_one_shape_on_both_paths(model: Path) -> None:
    async with client_of(model) as http:
        found = []
        for way in (DRAFTED, PLAIN):
            body = {
                "messages": [{"role": "user", "content": PROMPT}],
                "logprobs": True,
                "top_logprobs": 2,
                **way,
            }
            found.append(await ask(http, "/v1/chat/completions", body))
        assert accepted(found[0]) > 0 == accepted(found[1])
        assert found[0]["choices"] == found[1]["choices"]
        content = found[0]["choices"][0]["logprobs"]["content"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)


async def test_several_choices_beside_one_that_goes_on_speculating(model: Path) -> None:
    async with client_of(model) as http:
        several = complete(http, n=3, temperature=1, seed=7, **DRAFTED)
        single = complete(http, prompt="another", **DRAFTED)
        three, one = await asyncio.gather(several, single)
        assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
        assert len({choice["text"] for choice in three["choices"]}) == 3
        assert accepted(three) > 0
        assert accepted(one) > 0
        plain = await complete(http, n=3, temperature=1, seed=7, **PLAIN)
        assert plain["choices"] == three["choices"]


async def test_adapters_are_refused_by_name(model: Path) -> None:
    async with client_of(model) as http:
        body = {"model": "tiny", "prompt": PROMPT}
        for field in ("lora_path", "lora_request", "adapter_id"):
            response = await http.post("/v1/completions", json=body | {field: "some-adapter"})
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        response = await http.post("/v1/completions", json=body | {"model": "some-adapter"})
        assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


async def test_the_depth_that_is_asked_for_is_the_depth_of_every_step(model: Path) -> None:
    async with client_of(model) as http:
        for depth in (1, 2, 5):
            speculation = {"mode": "on", "num_speculative_tokens": depth}
            reply = await complete(http, speculation=speculation)
            assert len(reply["speculation"]["acceptance_per_position"]) == depth
            assert (
                len(reply["metrics"]["speculative_decoding"]["acceptance_histogram"]) == depth + 1
            )
