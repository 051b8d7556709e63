"""How much faster does an answer come whose client predicts it, nearly right?

    python -m benchmarks.prediction [--model SOURCE]

Each prompt is answered plain. Then it is asked again with its own answer as the prediction, every
tenth line of it changed: in one word, or replaced as a whole. Through the router's HTTP interface
and gRPC, all in this process, one request at a time, both ways by turns. The answers must be equal.
Time is wall-clock and, since other work may run on this machine, CPU time of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.measuring import print_table
from cluster.config import EMBEDDED_MODEL, ModelConfig, RouterConfig, VerifierConfig
from cluster.types import Member
from router.api import create_app
from router.service import RouterService
from verifier_service.service import VerifierService

PROMPTS = [
    "Write a Python class for a bank account: deposit, withdraw and show the balance.",
    "Write a SQL schema for a library: books, authors, members and loans.",
    "Write a Python program that plays tic-tac-toe on the command line.",
    "Write a poem of ten stanzas about the four seasons.",
    "Give me a recipe for vegetable soup with a list of ingredients and numbered steps.",
    "Write unit tests in Python for a function that sorts a list.",
]
NUM_TOKENS = 300
MIN_TOKENS = 200
CHANGED_EVERY = 10
NUM_ROUNDS = 1
START_TIMEOUT_S = 60.0

Change = Callable[[str], str]


def one_word(line: str) -> str:
    """The line with its longest word replaced."""
    return line.replace(max(line.split(), key=len), "something", 1) if line.split() else "# changed"


def whole_line(line: str) -> str:
    """Another line."""
    return "    # This line was written anew by somebody else."


CHANGES: dict[str, Change] = {"one word": one_word, "whole line": whole_line}


def changed(answer: str, change: Change) -> str:
    """The answer with every tenth line changed."""
    lines = answer.split("\n")
    return "\n".join(
        change(line) if number % CHANGED_EVERY == 0 else line
        for number, line in enumerate(lines, start=1)
    )


@dataclass(frozen=True, slots=True)
class Timed:
    """A reply and what it took."""

    reply: dict[str, Any]
    wall_s: float
    cpu_s: float

    @property
    def text(self) -> str:
        content: str = self.reply["choices"][0]["message"]["content"]
        return content


class Client:
    """Asks the router."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def ask(self, prompt: str, prediction: str | None = None) -> Timed:
        """One greedy answer; without a prediction it is plain decoding."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
        }
        if prediction is None:
            body["speculation"] = {"mode": "off"}
        else:
            body["prediction"] = {"type": "content", "content": prediction}
            body["speculation"] = {"drafter": "prediction"}
        wall, cpu = time.perf_counter(), time.process_time()
        response = await self._client.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        return Timed(response.json(), time.perf_counter() - wall, time.process_time() - cpu)


@asynccontextmanager
async def running_system(source: str) -> AsyncIterator[Client]:
    """A verifier and a router in this process, without any drafter replica."""
    config = VerifierConfig(model=ModelConfig(source=source))
    verifier = await VerifierService.start(config, host="127.0.0.1")
    router = RouterService(RouterConfig(), card=verifier.card)
    router.start()
    fingerprint = verifier.card.fingerprint
    member = Member(verifier.incarnation, verifier.address, fingerprint=fingerprint)
    router.update_members({verifier.incarnation: member})
    transport = httpx.ASGITransport(create_app(router))
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while router.not_ready_reason is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://router", timeout=None
        ) as client:
            yield Client(client, verifier.card.name)
    finally:
        await router.close()
        await verifier.stop(grace_s=1.0)


COLUMNS = (
    "tokens",
    "changes",
    "resyncs",
    "accepted",
    "rejected",
    "tokens/step",
    "faster",
    "faster, CPU",
)


@dataclass(slots=True)
class Compared:
    """One prompt and one kind of change, summed over the rounds."""

    num_tokens: int
    num_changes: int
    plain_s: float = 0.0
    plain_cpu_s: float = 0.0
    predicted_s: float = 0.0
    predicted_cpu_s: float = 0.0
    num_steps: int = 0
    num_resyncs: int = 0
    accepted: int = 0
    rejected: int = 0

    def add(self, plain: Timed, predicted: Timed) -> None:
        self.plain_s += plain.wall_s
        self.plain_cpu_s += plain.cpu_s
        self.predicted_s += predicted.wall_s
        self.predicted_cpu_s += predicted.cpu_s
        figures = predicted.reply["speculation"]
        self.num_steps, self.num_resyncs = figures["num_steps"], figures["num_resyncs"]
        details = predicted.reply["usage"]["completion_tokens_details"]
        self.accepted = details["accepted_prediction_tokens"]
        self.rejected = details["rejected_prediction_tokens"]

    def cells(self) -> list[str]:
        return [
            str(self.num_tokens),
            str(self.num_changes),
            str(self.num_resyncs),
            str(self.accepted),
            str(self.rejected),
            f"{self.num_tokens / self.num_steps:.1f}",
            f"{self.plain_s / self.predicted_s:.2f}",
            f"{self.plain_cpu_s / self.predicted_cpu_s:.2f}",
        ]


async def compare(client: Client, prompt: str) -> dict[str, Compared]:
    """By kind of change; nothing if the answer is too short to be changed."""
    first = await client.ask(prompt)
    num_tokens = first.reply["usage"]["completion_tokens"]
    num_changes = len(first.text.split("\n")) // CHANGED_EVERY
    if num_tokens < MIN_TOKENS or not num_changes:
        return {}
    compared = {name: Compared(num_tokens, num_changes) for name in CHANGES}
    for _ in range(NUM_ROUNDS):
        plain = await client.ask(prompt)
        for name, change in CHANGES.items():
            predicted = await client.ask(prompt, changed(first.text, change))
            if not predicted.text == plain.text == first.text:
                raise SystemExit(f"the answers differ: {prompt}")
            compared[name].add(plain, predicted)
    return compared


def print_change(name: str, kept: dict[str, Compared]) -> None:
    """What a kind of change does to each prompt, and to all together."""
    ones = kept.values()
    wall = sum(one.plain_s for one in ones) / sum(one.predicted_s for one in ones)
    cpu = sum(one.plain_cpu_s for one in ones) / sum(one.predicted_cpu_s for one in ones)
    print_table(
        f"Every tenth line changed: {name}",
        ["prompt", *COLUMNS],
        [[prompt[:40], *one.cells()] for prompt, one in kept.items()],
        f"all together {wall:.2f} times as fast as plain, by CPU time {cpu:.2f}; answers equal",
    )


async def run(source: str) -> None:
    async with running_system(source) as client:
        await client.ask(PROMPTS[0])
        by_prompt = {prompt: await compare(client, prompt) for prompt in PROMPTS}
    for name in CHANGES:
        print_change(name, {prompt: found[name] for prompt, found in by_prompt.items() if found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    asyncio.run(run(parser.parse_args().model))


if __name__ == "__main__":
    main()
