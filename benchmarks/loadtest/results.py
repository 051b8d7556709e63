"""results.json: what a load test found. Changing it means a new `schema_version`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from benchmarks.loadtest.profile import Slo
from benchmarks.loadtest.record import RequestRecord, read_records, write_records
from benchmarks.loadtest.statistics import Distribution, Estimate
from cluster.commands.command_error import CommandError
from cluster.config import Section

RESULTS = "results.json"
REQUESTS = "requests.jsonl"
REPORT = "report.html"


class RunInfo(Section):
    """How it was run."""

    command: str
    started_at: str
    """UTC, ISO 8601."""
    seconds: float
    versions: dict[str, str]
    """Of the load test's own side."""
    machine: str
    """Where the load came from."""
    workers: int
    """Ray workers; 0 is this process alone."""
    server: dict[str, Any]
    """url, model, and what the server said of itself at the start."""
    profile: dict[str, Any]
    """The profile with all its defaults."""
    interrupted: bool


class Acceptance(Section):
    """What became of drafts, over all requests: token-weighted."""

    num_draft_tokens: int
    num_accepted_tokens: int
    rate: float | None
    """Accepted over drafted."""
    length: float | None
    """Tokens per step that carried drafts: 1 + accepted / such steps."""
    histogram: tuple[int, ...]
    """Index j: steps with drafts of which exactly j were accepted."""
    per_position: tuple[float, ...]
    """Index j: share of the steps with drafts in which position j was accepted."""


class Refusals(Section):
    """429 and 503."""

    count: int
    by_code: dict[str, int]
    """Status and code of the error body."""
    with_retry_after: int
    latency_ms: Distribution
    """From the scheduled send to the end of the refusal."""


class FamilyResult(Section):
    """One kind of prompt."""

    family: str
    requests_ok: int
    output_tokens: float
    """Mean of a request."""
    tpot_p50_ms: float | None
    acceptance: Acceptance | None


class GroupResult(Section):
    """One level with one arm, all repeats together."""

    level: str
    level_value: float
    arm: str
    window_s: float
    """Seconds in which load was offered, all repeats."""
    offered_rps: float
    """Requests due per second."""
    outcomes: dict[str, int]
    concurrency: float
    """Mean of requests under way."""
    completed_rps: float
    """Requests that were due in the window and ended well, per second."""
    output_tokens_per_s: Estimate | None
    """Output tokens, of requests that ended well, that came within the window."""
    tokens_per_s_per_user: Estimate | None
    """Median over requests of 1 / TPOT."""
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    inter_chunk_ms: Distribution | None
    e2e_ms: Distribution | None
    schedule_delay_ms: Distribution | None
    """Real send minus scheduled send."""
    prompt_tokens: float | None
    """Mean of a request, as the server counts."""
    cached_share: float | None
    """Of prompt tokens."""
    output_tokens: float | None
    """Mean of a request."""
    attainment: Estimate | None
    """Share of all due requests that met the SLO; None without one."""
    goodput_rps: Estimate | None
    """Such requests per second."""
    speedup: Estimate | None
    """Output tokens per second over those of the baseline arm at this level."""
    acceptance: Acceptance | None
    """None where the server says nothing of drafts."""
    paths: dict[str, int]
    """Requests by path, as the server told it."""
    reasons: dict[str, int]
    """Its reasons, numbers left out, the most frequent first."""
    families: tuple[FamilyResult, ...]
    refusals: Refusals | None
    errors: dict[str, int]
    """Messages of requests that failed, the most frequent first."""


class CellInfo(Section):
    """One run of one level with one arm."""

    index: int
    repeat: int
    level: str
    arm: str
    started_s: float
    """Since the start of the load test."""
    wall_s: float
    window_s: float
    client_cpu_share: float
    """Of one core, of the busiest process that made load."""
    faults: tuple[str, ...]
    """Why its figures cannot be trusted; empty if they can."""


class Timeline(Section):
    """The whole run in steps of equal length; lists of one length."""

    step_s: float
    speculative: tuple[float, ...]
    """Requests under way that the server put on this path; mean within the step."""
    plain: tuple[float, ...]
    unknown: tuple[float, ...]
    """Requests that no path was told of, such as refused ones."""
    output_tokens_per_s: tuple[float, ...]
    refused: tuple[int, ...]
    mode: tuple[str, ...]
    """Of the cluster's path policy; empty where it was not seen."""
    running: tuple[float | None, ...]
    """Sequences that the verifiers report."""


class Results(Section):
    """A load test."""

    schema_version: Literal[1] = 1
    run: RunInfo
    slo: Slo
    capacity_rps: float | None
    """Where rates were multiples of it."""
    groups: tuple[GroupResult, ...]
    cells: tuple[CellInfo, ...]
    timeline: Timeline
    warnings: tuple[str, ...]
    """What a reader must know. Faults of cells are among them."""

    @property
    def is_valid(self) -> bool:
        """Whether no cell has a fault."""
        return not any(cell.faults for cell in self.cells)


def write_results(folder: Path, results: Results, records: list[RequestRecord]) -> None:
    """Both files."""
    write_records(folder / REQUESTS, records)
    (folder / RESULTS).write_text(results.model_dump_json(indent=1) + "\n")


def read_results(folder: Path) -> tuple[Results, list[RequestRecord]]:
    """Both files. Raises CommandError."""
    try:
        results = Results.model_validate_json((folder / RESULTS).read_text())
        return results, read_records(folder / REQUESTS)
    except OSError as error:
        raise CommandError(
            f"{folder} holds no finished load test ({error}). Give the --out of an earlier one"
        ) from None
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise CommandError(
            f"{folder} was written by another version of the load test, or changed since "
            f"({str(error).splitlines()[0]}). Run it again"
        ) from None
