"""Records and runs made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.loadtest.cell import Cell, ClosedOffer, Level, OpenOffer, Phase
from benchmarks.loadtest.cell_run import CellRun
from benchmarks.loadtest.profile import Arm, Profile
from benchmarks.loadtest.record import Outcome, RequestRecord
from benchmarks.loadtest.results import Results, RunInfo
from benchmarks.loadtest.summary import summarise


def ok(scheduled_s: float = 0.0, end_s: float = 1.0, **changes: Any) -> RequestRecord:
    """A request of 7 tokens, of which 3 came first at half of its time."""
    fields: dict[str, Any] = {
        "cell": 0,
        "index": 0,
        "family": "chat",
        "scheduled_s": scheduled_s,
        "sent_s": scheduled_s,
        "end_s": end_s,
        "outcome": Outcome.OK,
        "status": 200,
        "chunk_s": ((scheduled_s + end_s) / 2, end_s),
        "chunk_tokens": (3, 7),
        "prompt_tokens": 20,
        "cached_tokens": 5,
        "output_tokens": 7,
    }
    return RequestRecord(**(fields | changes))


def refused(scheduled_s: float = 0.0, after_s: float = 0.01, **changes: Any) -> RequestRecord:
    fields = {
        "outcome": Outcome.REFUSED,
        "status": 503,
        "code": "overloaded",
        "retry_after_s": 1.0,
        "chunk_s": (),
        "chunk_tokens": (),
        "output_tokens": None,
        "prompt_tokens": None,
        "cached_tokens": None,
    }
    return ok(scheduled_s, scheduled_s + after_s, **(fields | changes))


def speculated(
    histogram: Sequence[int], drafted: int, path: str = "speculative", **changes: Any
) -> RequestRecord:
    accepted = sum(count * steps for count, steps in enumerate(histogram))
    told = {
        "path": path,
        "reason": "auto: 0.0 running per verifier, below 3",
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
    }
    return ok(speculation=told, accepted_histogram=tuple(histogram), **changes)


def closed_run(
    records: Sequence[RequestRecord],
    duration_s: float = 10.0,
    *,
    arm: str = "all",
    index: int = 0,
    users: int = 4,
    **changes: Any,
) -> CellRun:
    offer = ClosedOffer((Phase(users, duration_s),), None)
    cell = Cell(index, 0, Level(f"{users} users", users, offer), Arm(name=arm), 0)
    fields = {"wall_s": duration_s, "client_cpu_share": 0.1, **changes}
    return CellRun(cell, list(records), **fields)


def open_run(records: Sequence[RequestRecord], duration_s: float = 10.0) -> CellRun:
    cell = Cell(0, 0, Level("1 req/s", 1.0, OpenOffer((), duration_s)), Arm(name="all"), 0)
    return CellRun(cell, list(records), wall_s=duration_s, client_cpu_share=0.1)


def make_profile(**changes: Any) -> Profile:
    fields = {
        "prompts": {"kind": "generated"},
        "load": {"kind": "closed", "concurrency": [4], "duration_s": 10},
        **changes,
    }
    return Profile.model_validate(fields)


def results(runs: Sequence[CellRun], profile: Profile | None = None, **server: Any) -> Results:
    profile = profile or make_profile()
    info = RunInfo(
        command="paceline loadtest --profile x.yaml",
        started_at="2026-01-01T00:00:00+00:00",
        seconds=10.0,
        versions={"paceline": "0"},
        machine="here",
        workers=0,
        server={"url": "http://server", "model": "m", **server},
        profile=profile.model_dump(mode="json"),
        interrupted=any(run.interrupted for run in runs),
    )
    return summarise(info, profile, runs, None)
