"""A verifier is lost: its requests go on elsewhere, with the same tokens and none twice."""

from __future__ import annotations

import asyncio

import pytest

from cluster.config import RouterConfig
from cluster.types import ErrorEvent
from tests.router.deployment import Deployment, deploy
from tests.router.sse import chat_text, events, finish_reasons
from tests.support.polling import eventually
from tests.support.scripted_verifier import ScriptedVerifier, Step, endless, make_card, saying


async def two(step_s: float = 0.005) -> tuple[ScriptedVerifier, ScriptedVerifier]:
    return ScriptedVerifier(endless(2), step_s=step_s), ScriptedVerifier(endless(2), step_s=step_s)


def busy(deployment: Deployment) -> ScriptedVerifier:
    return next(verifier for verifier in deployment.verifiers if verifier.num_running)


async def undisturbed(seed: int, max_tokens: int) -> str:
    async with deploy(ScriptedVerifier(endless(2))) as deployment:
        body = (await deployment.chat(seed=seed, max_tokens=max_tokens)).json()
        return str(body["choices"][0]["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_running_request_goes_on_with_the_same_tokens(stream: bool) -> None:
    expected = await undisturbed(seed=7, max_tokens=100)
    async with deploy(*await two()) as deployment:
        running = asyncio.create_task(deployment.chat(seed=7, max_tokens=100, stream=stream))
        await eventually(lambda: any(v.most_tokens_told > 10 for v in deployment.verifiers))
        victim = busy(deployment)
        await victim.kill()
        response = await running
        heir = next(v for v in deployment.verifiers if v is not victim)
        (resumed,) = heir.submitted
        assert 0 < len(resumed.resumed_ids) < 100
        assert resumed.request_key == victim.submitted[0].request_key
        assert resumed.request_id != victim.submitted[0].request_id
        if stream:
            *chunks, done = events(response.text)
            assert done == "[DONE]"
            assert (chat_text(chunks), finish_reasons(chunks)) == (expected, ["length"])
        else:
            body = response.json()
            assert body["choices"][0]["message"]["content"] == expected
            assert body["usage"]["completion_tokens"] == 100
        await eventually(lambda: deployment.is_idle)


async def test_a_request_without_a_token_is_retried_elsewhere() -> None:
    first, second = await two()
    first.paused = second.paused = True
    async with deploy(first, second) as deployment:
        running = asyncio.create_task(deployment.chat(max_tokens=10))
        await eventually(lambda: any(v.num_running for v in deployment.verifiers))
        first.paused = second.paused = False
        await busy(deployment).kill()
        assert (await running).status_code == 200


@pytest.mark.parametrize("n", [1, 3])
async def test_without_another_verifier_a_stream_ends_with_an_error(n: int) -> None:
    async with deploy(ScriptedVerifier(endless(), step_s=0.005)) as deployment:
        running = asyncio.create_task(deployment.chat(stream=True, n=n))
        await eventually(lambda: deployment.verifier.num_running == n)
        await eventually(lambda: deployment.verifier.most_tokens_told > 10)
        await deployment.verifier.kill()
        *chunks, last = events((await running).text)
        assert chat_text(chunks)
        assert finish_reasons(chunks) == []
        assert last["error"]["type"] == "upstream_lost"
        await eventually(lambda: deployment.is_idle)


async def test_without_another_verifier_a_whole_reply_is_502() -> None:
    async with deploy(ScriptedVerifier(endless(), step_s=0.005)) as deployment:
        running = asyncio.create_task(deployment.chat())
        await eventually(lambda: deployment.verifier.num_running == 1)
        await deployment.verifier.kill()
        assert (await running).status_code == 502
        assert (await deployment.chat()).status_code == 503
        await eventually(lambda: deployment.is_idle)


async def test_with_resuming_off_a_lost_verifier_is_an_error_beside_an_idle_one() -> None:
    first, second = await two()
    async with deploy(first, second, config=RouterConfig(max_resumes=0)) as deployment:
        running = asyncio.create_task(deployment.chat())
        await eventually(lambda: any(v.num_running for v in deployment.verifiers))
        await busy(deployment).kill()
        assert (await running).status_code == 502
        assert len(first.submitted) + len(second.submitted) == 1


async def test_another_model_never_takes_over() -> None:
    mine = ScriptedVerifier(endless(), step_s=0.005)
    other = ScriptedVerifier(endless(), card=make_card(fingerprint="other"))
    async with deploy(mine) as deployment:
        deployment.verifiers.append(await other.start())
        deployment.tell_members()
        running = asyncio.create_task(deployment.chat())
        await eventually(lambda: mine.num_running == 1)
        await mine.kill()
        assert (await running).status_code == 502
        assert other.submitted == []


async def test_many_requests_survive_one_of_two_verifiers() -> None:
    async with deploy(*await two()) as deployment:
        running = [asyncio.create_task(deployment.chat(max_tokens=60)) for _ in range(16)]
        await eventually(lambda: sum(v.num_running for v in deployment.verifiers) == 16)
        await asyncio.sleep(0.03)
        await deployment.verifier.kill()
        responses = await asyncio.gather(*running)
        assert {response.status_code for response in responses} == {200}
        counts = {response.json()["usage"]["completion_tokens"] for response in responses}
        assert counts == {60}
        await eventually(lambda: deployment.is_idle)


async def test_a_full_verifier_is_passed_over() -> None:
    full = Step((), error=ErrorEvent("", "OverloadedError", "the queue is full"))
    async with deploy(
        ScriptedVerifier(lambda r: [full]), ScriptedVerifier(saying("fox"))
    ) as deployment:
        for _ in range(6):
            response = await deployment.chat()
            assert response.status_code == 200
        await deployment.verifiers[1].kill()
        response = await deployment.chat()
        assert response.status_code == 503
        assert response.headers["retry-after"]
