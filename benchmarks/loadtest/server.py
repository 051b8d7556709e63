"""What is asked of the server beside the load: what it is, what it can do, how it fares."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from benchmarks.loadtest.client import Ask, Clock, Target, http_session, send
from benchmarks.loadtest.profile import Profile
from benchmarks.loadtest.prompts import PromptSource
from benchmarks.loadtest.record import Json, Outcome, RequestRecord
from cluster.commands.command_error import CommandError

SAMPLE_PERIOD_S = 1.0
REPLY_TIMEOUT_S = 10.0
OPTIONAL_FIELDS = ("continuous_usage_stats", "cache_salt")
WARMUP_INDEX = -1_000_000
"""Prompts of the warm-up are those before all others."""


@dataclass(frozen=True, slots=True)
class ServerSample:
    """GET /v1/cluster of a Paceline router, at one moment."""

    time_s: float
    """Since the start of the cell."""
    mode: str
    """Of the path policy."""
    running: int
    """Sequences, all verifiers together."""
    waiting: int


async def find_target(url: str, profile: Profile, headers: Mapping[str, str]) -> Target:
    """How to ask this server. Raises CommandError if it is none."""
    model = profile.model or _first_model(url, await get_json(url, "/v1/models", headers))
    return Target(
        url=url,
        endpoint=profile.endpoint,
        model=model,
        headers=headers,
        timeout_s=profile.request_timeout_s,
    )


def _first_model(url: str, models: Json | None) -> str:
    try:
        return str((models or {})["data"][0]["id"])
    except (IndexError, KeyError, TypeError):
        raise CommandError(
            f"{url}/v1/models lists no model. Is the server up? Check --url (without /v1), set "
            "--api-key if it asks for one, or name `model` in the profile"
        ) from None


async def get_json(url: str, path: str, headers: Mapping[str, str]) -> Json | None:
    """A JSON object, or None where the server has none to give."""
    timeout = aiohttp.ClientTimeout(total=REPLY_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url + path, headers=headers) as response,
        ):
            body = await response.read() if response.status == 200 else b""
            value = json.loads(body) if body else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
    return value if isinstance(value, dict) else None


async def warm_up(target: Target, profile: Profile, prompts: PromptSource) -> Target:
    """Send each arm's warm-up requests one by one, the first to learn what the server accepts.

    Returns the target as it must be asked. Raises CommandError if an arm's first request fails.
    """
    target = await _accepted(target, profile, prompts)
    for arm in profile.arms:
        fields = {**profile.body, **arm.body}
        for number in range(max(1, profile.warmup_requests)):
            record = await _try(target, prompts, number, fields)
            if number == 0 and record.outcome is not Outcome.OK:
                raise CommandError(f"arm {arm.name!r}: the first request failed: {_why(record)}")
    return target


async def _accepted(target: Target, profile: Profile, prompts: PromptSource) -> Target:
    """Leave out what a server refuses by name."""
    for _ in OPTIONAL_FIELDS:
        record = await _try(target, prompts, 0, profile.body)
        if record.status != 400:
            break
        if "continuous_usage_stats" in record.message or "stream_options" in record.message:
            target = replace(target, usage_per_chunk=False)
        elif target.has_cache_salt:
            target = replace(target, has_cache_salt=False)
    return target


async def _try(
    target: Target, prompts: PromptSource, number: int, fields: Mapping[str, Any]
) -> RequestRecord:
    prompt = prompts.prompt(WARMUP_INDEX + number, None)
    ask = Ask(-1, number, prompt, fields, "warm-up", 0.0)
    async with http_session() as session:
        return await send(session, target, Clock(0.0), ask, [])


def _why(record: RequestRecord) -> str:
    status = "" if record.status in (None, 200) else f"{record.status} "
    return f"{status}{record.message}"


async def describe(target: Target) -> Json:
    """What the server says of itself: the first answers that it has."""
    told: Json = {"url": target.url, "model": target.model}
    for name, path in (("info", "/server_info"), ("cluster", "/v1/cluster")):
        answer = await get_json(target.url, path, target.headers)
        if answer is not None:
            told[name] = answer
    return told


async def watch_server(target: Target, clock: Clock, samples: list[ServerSample]) -> None:
    """Take a sample every second until cancelled. A server that gives none at first has none."""
    while True:
        report = await get_json(target.url, "/v1/cluster", target.headers)
        sample = None if report is None else _sample(report, clock.now_s())
        if sample is not None:
            samples.append(sample)
        elif not samples:
            return
        await asyncio.sleep(SAMPLE_PERIOD_S)


def _sample(report: Json, now_s: float) -> ServerSample | None:
    try:
        verifiers = report["verifiers"]
        return ServerSample(
            time_s=now_s,
            mode=str(report["mode"]),
            running=sum(int(row["running"]) for row in verifiers),
            waiting=sum(int(row["waiting"]) for row in verifiers),
        )
    except (KeyError, TypeError, ValueError):
        return None
