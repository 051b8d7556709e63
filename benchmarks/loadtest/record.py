"""What became of one request. All times are seconds since the start of its cell."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.loadtest.profile import Slo

Json = dict[str, Any]


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    """The stream came to its `[DONE]`."""
    REFUSED = "refused"
    """429 or 503 before the first byte of an answer."""
    ERROR = "error"
    """Another status that is not 200."""
    BROKEN = "broken"
    """The stream held an error event or nonsense, or ended without `[DONE]`."""
    TIMEOUT = "timeout"
    """No end within `request_timeout_s`."""
    UNREACHABLE = "unreachable"
    """No answer at all: refused or broken connections."""
    CANCELLED = "cancelled"
    """The load test was interrupted."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request."""

    cell: int
    """Index of its cell."""
    index: int
    """Which request of its cell; the same index asks the same in every arm."""
    family: str
    scheduled_s: float
    """When it was due. Latencies count from here."""
    sent_s: float
    """When it was sent."""
    end_s: float
    """When its last byte came, or it was given up."""
    outcome: Outcome
    status: int | None = None
    """HTTP status, if there was one."""
    message: str = ""
    """Of an error."""
    code: str = ""
    """Of an error body, or its type."""
    retry_after_s: float | None = None
    chunk_s: tuple[float, ...] = ()
    """When each chunk with text came."""
    chunk_tokens: tuple[int, ...] = ()
    """Output tokens up to the end of each of these chunks; empty if the server does not say."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server did not have to compute."""
    output_tokens: int | None = None
    finish_reason: str = ""
    speculation: Json | None = None
    """Paceline's account of the request, if the server sent one."""
    accepted_histogram: tuple[int, ...] = ()
    """Index j: steps with drafts of which exactly j were accepted (vLLM's per-request figures)."""

    @property
    def schedule_delay_s(self) -> float:
        """How late the load test itself was."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Time to the first text."""
        return self.chunk_s[0] - self.scheduled_s if self.chunk_s else None

    @property
    def e2e_s(self) -> float:
        """Time to the end."""
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first chunk: (E2E - TTFT) / (n - tokens in that chunk).

        A server that does not count per chunk is taken to send one token first. None where nothing
        follows the first chunk.
        """
        num_first = self.chunk_tokens[0] if self.chunk_tokens else 1
        num_later = (self.output_tokens or 0) - num_first
        if self.ttft_s is None or num_later < 1:
            return None
        return (self.e2e_s - self.ttft_s) / num_later

    @property
    def path(self) -> str:
        """speculative, plain, or unknown."""
        return str((self.speculation or {}).get("path", "unknown"))

    def new_tokens(self) -> list[float]:
        """Output tokens that each chunk brought. Those that ended without text, such as half of a
        character, are counted to the last one. Spread evenly where the server does not say."""
        if not self.chunk_s:
            return []
        total = self.output_tokens or 0
        if not self.chunk_tokens:
            return [total / len(self.chunk_s)] * len(self.chunk_s)
        ends = (0, *self.chunk_tokens[:-1], max(total, self.chunk_tokens[-1]))
        return [float(end - start) for start, end in pairwise(ends)]

    def meets(self, slo: Slo) -> bool:
        """Whether it ended well within every bound. Without any text its end counts as TTFT."""
        if self.outcome is not Outcome.OK:
            return False
        ttft_s = self.e2e_s if self.ttft_s is None else self.ttft_s
        asked = ((slo.ttft_ms, ttft_s), (slo.tpot_ms, self.tpot_s), (slo.e2e_ms, self.e2e_s))
        return all(
            bound is None or measured is None or measured * 1_000 <= bound
            for bound, measured in asked
        )


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    """As JSON lines."""
    with path.open("w") as file:
        for record in records:
            file.write(json.dumps(asdict(record), separators=(",", ":")) + "\n")


def read_records(path: Path) -> list[RequestRecord]:
    """What `write_records` wrote. Raises OSError, KeyError, TypeError, ValueError."""
    with path.open() as file:
        return [_record(json.loads(line)) for line in file]


def _record(row: Json) -> RequestRecord:
    tuples = {
        name: tuple(row.pop(name)) for name in ("chunk_s", "chunk_tokens", "accepted_histogram")
    }
    return RequestRecord(**{**row, **tuples, "outcome": Outcome(row["outcome"])})
