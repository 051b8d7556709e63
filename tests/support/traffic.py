"""Steady traffic: streams that follow one another, each answer compared with what it must be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed completion."""

    text: str
    end: str
    """The last event: [DONE], or what the stream broke off with."""
    num_accepted_tokens: int = 0
    path: str = ""


@dataclass(slots=True)
class Traffic:
    """What came of it so far."""

    answers: list[tuple[int, Answer]] = field(default_factory=list)
    """(index of the request, its answer), in order of their ends."""
    progress: dict[int, int] = field(default_factory=dict)
    """Characters of the running answer, by index of the request."""

    def wrong(self, expected: Sequence[Answer]) -> list[tuple[int, Answer]]:
        """Answers that were lost or are not what they must be."""
        return [
            (index, answer)
            for index, answer in self.answers
            if (answer.text, answer.end) != (expected[index].text, "[DONE]")
        ]


async def complete(
    http: httpx.AsyncClient, body: Body, progress: dict[int, int] | None = None, index: int = 0
) -> Answer:
    """Stream a completion. Whatever goes wrong is in the answer."""
    text, end, spent = "", "", {}
    try:
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            if reply.status_code != 200:
                return Answer("", f"{reply.status_code}: {(await reply.aread()).decode()}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                end = line[6:]
                if end.startswith("{") and (chunk := json.loads(end)).get("choices"):
                    text += chunk["choices"][0]["text"]
                    spent = chunk.get("speculation") or spent
                    if progress is not None:
                        progress[index] = len(text)
    except httpx.HTTPError as error:
        end = f"{type(error).__name__}: {error}"
    return Answer(text, end, spent.get("num_accepted_tokens", 0), spent.get("path", ""))


@asynccontextmanager
async def steady_traffic(url: str, bodies: Sequence[Body]) -> AsyncIterator[Traffic]:
    """One stream for each body, over and over until the context is left; then the last answers
    are waited for."""
    traffic = Traffic()
    leaving = asyncio.Event()

    async def go(http: httpx.AsyncClient, index: int) -> None:
        while not leaving.is_set():
            traffic.progress[index] = 0
            answer = await complete(http, bodies[index], traffic.progress, index)
            traffic.answers.append((index, answer))

    async with httpx.AsyncClient(base_url=url, timeout=60) as http, asyncio.TaskGroup() as group:
        for index in range(len(bodies)):
            group.create_task(go(http, index))
        try:
            yield traffic
        finally:
            leaving.set()
