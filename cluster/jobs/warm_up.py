"""Requests until answers begin as fast as they will: every verifier has then run its first steps.

    ray job submit --runtime-env cluster/jobs/runtime_env.yaml -- \\
        python -m cluster.jobs.warm_up --url http://127.0.0.1:8000

After a deployment or a scale-up, and before a load test. An API key is taken from PACELINE_API_KEY.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from cluster.commands.api_client import DEFAULT_URL, ApiClient
from cluster.commands.command_error import CommandError

REQUESTS_PER_VERIFIER = 8
"""With prompts that differ from their first token on: some go to every verifier."""
STEADY = 1.25
"""A round this near to the best one before it is as fast as it gets."""
MAX_ROUNDS = 10


def warm_up(client: ApiClient) -> list[float]:
    """Seconds to the first token, the median of each round."""
    model = client.get_json("/v1/models")["data"][0]["id"]
    num_verifiers = len(client.get_json("/v1/cluster")["verifiers"])
    num_requests = REQUESTS_PER_VERIFIER * max(1, num_verifiers)
    medians: list[float] = []
    for number in range(MAX_ROUNDS):
        prompts = [f"{index} of round {number}:" for index in range(num_requests)]
        with ThreadPoolExecutor(num_requests) as pool:
            times = pool.map(lambda prompt: _first_token_s(client, model, prompt), prompts)
            medians.append(median(times))
        print(f"round {number + 1}: first token after {1e3 * medians[-1]:.0f} ms", flush=True)
        if number and medians[-1] <= STEADY * min(medians[:-1]):
            break
    return medians


def _first_token_s(client: ApiClient, model: str, prompt: str) -> float:
    started = time.monotonic()
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "stream": True}
    events = client.stream("/v1/completions", body)
    next(events)
    elapsed_s = time.monotonic() - started
    for _ in events:
        pass
    return elapsed_s


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default=DEFAULT_URL, help="a router (%(default)s)")
    arguments = parser.parse_args(argv)
    try:
        warm_up(ApiClient(arguments.url))
    except CommandError as error:
        print(f"warm_up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
