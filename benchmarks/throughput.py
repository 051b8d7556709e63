"""Tokens per second over HTTP, alone and concurrent, for each speculation mode, in one run.

    python -m benchmarks.throughput [--max-tokens 96]

Three kinds of text: free prose, which an n-gram drafter can do little with, code, and copying.
"""

from __future__ import annotations

import argparse
import asyncio

from benchmarks.http_streams import Streams, run_streams
from tests.support import prompts
from tests.support.local_system import LocalSystem

PORT = 8918
CONCURRENCIES = (1, 8, 32)
KINDS = {
    "prose": prompts.CHAT,
    "code": prompts.CODE,
    "copy": [f"{line}\n" * 4 for line in prompts.LINES],
}


async def _measure(
    system: LocalSystem, model: str, kind: str, concurrency: int, mode: str, max_tokens: int
) -> Streams:
    texts = KINDS[kind]
    bodies = [
        {
            "model": model,
            "prompt": texts[index % len(texts)],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            # No run may read what the one before it has computed.
            "cache_salt": f"{kind} {concurrency} {mode}",
            "speculation": {"mode": mode},
        }
        for index in range(concurrency)
    ]
    return await run_streams(system.url, bodies)


async def _table(system: LocalSystem, max_tokens: int) -> None:
    model = system.cluster()["verifiers"][0]["model"]
    print(
        f"{'text':8}{'streams':>8}{'off tok/s':>11}{'on / off':>10}{'auto / off':>12}", flush=True
    )
    for kind in KINDS:
        for concurrency in CONCURRENCIES:
            speeds = {}
            for mode in ("off", "on", "auto"):
                run = await _measure(system, model, kind, concurrency, mode, max_tokens)
                speeds[mode] = run.tokens_per_s
            on, auto = (speeds[mode] / speeds["off"] for mode in ("on", "auto"))
            print(f"{kind:8}{concurrency:8}{speeds['off']:11.1f}{on:10.2f}{auto:12.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    with LocalSystem(port=PORT) as system:
        print(f"ready after {system.started_in_s:.1f} s", flush=True)
        asyncio.run(_table(system, arguments.max_tokens))


if __name__ == "__main__":
    main()
