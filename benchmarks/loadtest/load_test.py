"""A load test from profile to report."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import secrets
import shlex
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.loadtest.cell import Cell, capacity_cell, plan_cells
from benchmarks.loadtest.cell_run import CellRun, Job
from benchmarks.loadtest.comparison import compare
from benchmarks.loadtest.profile import OpenLoad, Profile, load_profile, shipped_profiles
from benchmarks.loadtest.progress import Progress
from benchmarks.loadtest.prompts import make_prompts
from benchmarks.loadtest.record import Json, Outcome, RequestRecord
from benchmarks.loadtest.report import render
from benchmarks.loadtest.results import REPORT, Results, RunInfo, read_results, write_results
from benchmarks.loadtest.server import describe, find_target, warm_up
from benchmarks.loadtest.summary import summarise
from benchmarks.loadtest.workers import LoadGenerator, RayWorkers, ThisProcess
from cluster.commands.command_error import CommandError

REPORTED_PACKAGES = ("paceline", "aiohttp", "numpy")
KEY_OPTION = "--api-key"


def list_profiles() -> None:
    """Print the shipped profiles."""
    for name in shipped_profiles():
        print(f"{name:12} {load_profile(name).description}")


def run(arguments: argparse.Namespace) -> bool:
    """Run it and write its files; whether it came to its end, with answers, and can be trusted.

    Raises CommandError if nothing could be run. Ctrl-C ends the load; what was found until then is
    reported.
    """
    profile = _profile(arguments)
    other = None if arguments.compare is None else read_results(arguments.compare)
    _make_folder(arguments.out)
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    job, server = asyncio.run(_prepare(arguments.url, profile, headers))
    generator: LoadGenerator = ThisProcess(job)
    if arguments.workers:
        generator = RayWorkers(job, arguments.workers)

    started_at, started = datetime.now(UTC), time.perf_counter()
    test = LoadTest(profile, generator)
    interrupted = test.run()
    info = RunInfo(
        command=_command(sys.argv),
        started_at=started_at.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - started,
        versions={name: version(name) for name in REPORTED_PACKAGES},
        machine=f"{platform.node()}, {platform.platform()}, {os.cpu_count()} CPUs, "
        f"Python {platform.python_version()}",
        workers=arguments.workers,
        server=server,
        profile=profile.model_dump(mode="json"),
        interrupted=interrupted,
    )
    results = summarise(info, profile, test.runs, test.capacity_rps)
    records = [record for each in test.runs for record in each.records]
    write_results(arguments.out, results, records)
    _write_report(arguments.out, results, records, other)
    _print_end(arguments.out, results)
    answered = any(record.outcome is Outcome.OK for record in records)
    return answered and results.is_valid and not interrupted


def report_again(folder: Path, compare_with: Path) -> bool:
    """Write the report of a run that is there, beside another one. Raises CommandError."""
    results, records = read_results(folder)
    _write_report(folder, results, records, read_results(compare_with))
    print(folder / REPORT)
    return True


class LoadTest:
    """Runs cells one after another."""

    def __init__(self, profile: Profile, generator: LoadGenerator) -> None:
        self.runs: list[CellRun] = []
        self.capacity_rps: float | None = None
        self._profile = profile
        self._generator = generator
        self._started = time.perf_counter()

    def run(self) -> bool:
        """All cells, or those until Ctrl-C; whether that came."""
        try:
            load = self._profile.load
            if isinstance(load, OpenLoad) and load.rate_of_capacity:
                self.capacity_rps = self._measure_capacity(load)
            cells = plan_cells(self._profile, self.capacity_rps)
            progress = Progress(len(cells), sys.stderr)
            for cell in cells:
                self._run_cell(cell, progress)
        except KeyboardInterrupt:
            return True
        return False

    def _measure_capacity(self, load: OpenLoad) -> float:
        """Requests per second of a closed level. Raises CommandError if none is answered."""
        cell = capacity_cell(self._profile, load)
        run = self._run_cell(cell, Progress(1, sys.stderr))
        self.runs.remove(run)
        within = [r for r in run.records if r.outcome is Outcome.OK and r.end_s <= run.window_s]
        if not within:
            raise CommandError(
                f"no request ended within the {load.duration_s:g} s that measure the capacity. "
                "Give a longer duration_s or shorter outputs"
            )
        return len(within) / run.window_s

    def _run_cell(self, cell: Cell, progress: Progress) -> CellRun:
        run = CellRun(cell, started_s=time.perf_counter() - self._started)
        self.runs.append(run)
        progress.begin(cell.title)
        try:
            self._generator.run(run, progress.ended)
        finally:
            progress.finish(_in_short(run))
        return run


def _profile(arguments: argparse.Namespace) -> Profile:
    profile = load_profile(arguments.profile)
    changes: Json = {}
    if arguments.seed is not None:
        changes["seed"] = arguments.seed
    if arguments.model is not None:
        changes["model"] = arguments.model
    return profile.model_copy(update=changes)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot make the folder {folder} ({error})") from None


async def _prepare(url: str, profile: Profile, headers: Mapping[str, str]) -> tuple[Job, Json]:
    prompts = make_prompts(profile.prompts, profile.seed)
    target = await find_target(url, profile, headers)
    server = await describe(target)
    target = await warm_up(target, profile, prompts)
    return Job(profile, target, prompts, secrets.token_hex(4)), server


def _in_short(run: CellRun) -> str:
    ok = [record for record in run.records if record.outcome is Outcome.OK]
    tokens = sum(record.output_tokens or 0 for record in ok)
    rest = len(run.records) - len(ok)
    return f"{len(ok)} ok, {rest} not, {tokens} tokens in {run.wall_s:.1f} s"


def _command(argv: list[str]) -> str:
    """As typed, without the key."""
    shown = list(argv)
    for place, word in enumerate(shown):
        if word == KEY_OPTION and place + 1 < len(shown):
            shown[place + 1] = "..."
        elif word.startswith(f"{KEY_OPTION}="):
            shown[place] = f"{KEY_OPTION}=..."
    return shlex.join([Path(shown[0]).name, *shown[1:]])


def _write_report(
    folder: Path,
    results: Results,
    records: list[RequestRecord],
    other: tuple[Results, list[RequestRecord]] | None,
) -> None:
    comparison = None if other is None else compare((results, records), other)
    (folder / REPORT).write_text(render(results, records, comparison))


def _print_end(folder: Path, results: Results) -> None:
    for warning in results.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if not results.is_valid:
        print("paceline: the figures cannot be trusted, see the warnings", file=sys.stderr)
    print(folder / REPORT)
