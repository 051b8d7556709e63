"""Does the transport eat the engine? Tokens per second of 32 streams through HTTP, router and gRPC,
against the same engine driven in one process; and what the router adds to the first token.

    python -m benchmarks.transport
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time

from benchmarks.http_streams import run_streams
from cluster.config import EMBEDDED_MODEL
from cluster.types import GenerationRequest, Member, Path, SamplingParams
from tests.support.local_system import LocalSystem
from tests.support.polling import eventually

NUM_STREAMS = 32
NUM_TOKENS = 64
PROMPT_IDS = tuple(range(1000, 1020))
PORT = 8917


def direct() -> float:
    """Tokens per second of the engine alone: no network, no router."""
    from cluster.config import KVCacheConfig, ModelConfig, SchedulerConfig, SpeculationConfig
    from engine.loader import load_model
    from engine.model_runner import ModelRunner
    from verifier_service.engine import Engine
    from verifier_service.events import EngineOutput, Submitted

    runner = ModelRunner(load_model(ModelConfig(source=EMBEDDED_MODEL)), KVCacheConfig())
    counted = 0

    def count(output: EngineOutput) -> None:
        nonlocal counted
        counted += sum(len(getattr(item.event, "token_ids", ())) for item in output.events)

    engine = Engine(runner, SchedulerConfig(), SpeculationConfig(), count)
    engine.start()
    speeds = []
    for run in range(3):
        counted, started = 0, time.perf_counter()
        for index in range(NUM_STREAMS):
            engine.inbox.put(Submitted(run * NUM_STREAMS + index, _request(f"{run}-{index}")))
        while counted < NUM_STREAMS * NUM_TOKENS:
            time.sleep(0.001)
        speeds.append(counted / (time.perf_counter() - started))
    engine.stop(5.0)
    return max(speeds)


def _request(request_id: str, max_tokens: int = NUM_TOKENS) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        request_key=1,
        prompt_ids=PROMPT_IDS,
        sampling=SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        ignore_eos=True,
        path=Path.PLAIN,
    )


def _body(model: str, max_tokens: int = NUM_TOKENS) -> dict[str, object]:
    return {
        "model": model,
        "prompt": list(PROMPT_IDS),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "speculation": {"mode": "off"},
    }


async def through_http(system: LocalSystem) -> float:
    model = system.cluster()["verifiers"][0]["model"]
    runs = [
        await run_streams(system.url, [_body(model) for _ in range(NUM_STREAMS)]) for _ in range(3)
    ]
    return max(run.tokens_per_s for run in runs)


async def first_tokens(system: LocalSystem, num_rounds: int = 30) -> tuple[float, float]:
    """Median time to the first token in ms, (over gRPC, over HTTP), measured by turns."""
    from router.generation_client import GenerationClient, LinkState

    [verifier] = system.cluster()["verifiers"]
    member = Member(verifier["incarnation"], verifier["address"])
    client = GenerationClient(member, "benchmark", verifier["fingerprint"], time.monotonic)
    await eventually(lambda: client.state is LinkState.READY)
    over_grpc, over_http = [], []
    for index in range(num_rounds):
        started = time.perf_counter()
        async for _ in client.submit(_request(f"first-{index}", 1)):
            over_grpc.append(time.perf_counter() - started)
        run = await run_streams(system.url, [_body(verifier["model"], 1)])
        over_http.append(run.first_chunk_s[0])
    await client.close()
    return 1e3 * statistics.median(over_grpc), 1e3 * statistics.median(over_http)


def main() -> None:
    if sys.argv[1:] == ["direct"]:
        print(direct())
        return
    command = [sys.executable, "-m", "benchmarks.transport", "direct"]
    alone = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    with LocalSystem(port=PORT) as system:
        http = asyncio.run(through_http(system))
        grpc_ms, http_ms = asyncio.run(first_tokens(system))
    print(f"{NUM_STREAMS} streams: {alone:.0f} tokens/s in process, {http:.0f} over HTTP")
    print(f"ratio {http / alone:.2f}")
    print(f"first token: {grpc_ms:.1f} ms over gRPC, {http_ms:.1f} ms over HTTP")
    print(f"the router and Serve's ingress add {http_ms - grpc_ms:.1f} ms")


if __name__ == "__main__":
    main()
