"""Cells against a scripted server: who is asked when, and what a stall looks like."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from aiohttp import web

from benchmarks.loadtest.arrivals import Arrival
from benchmarks.loadtest.cell import Cell, ClosedOffer, Level, OpenOffer, Phase
from benchmarks.loadtest.cell_run import CellRun, Job, run_cell
from benchmarks.loadtest.client import Target
from benchmarks.loadtest.offering import WHOLE, Shard
from benchmarks.loadtest.profile import Arm
from benchmarks.loadtest.prompts import make_prompts
from benchmarks.loadtest.record import Outcome, RequestRecord
from benchmarks.loadtest.workers import merge_into
from tests.benchmarks.loadtest.records import make_profile
from tests.benchmarks.loadtest.scripted_server import (
    Exchange,
    ScriptedServer,
    answering,
    refusal,
    scripted_server,
)
from tests.support.polling import eventually

STALL_S = 0.6


def run(server: ScriptedServer, offer: ClosedOffer | OpenOffer, shard: Shard = WHOLE) -> CellRun:
    profile = make_profile()
    job = Job(
        profile, Target(server.url, "chat", "m"), make_prompts(profile.prompts, 0), "run", shard
    )
    cell = CellRun(Cell(0, 0, Level("level", 1.0, offer), Arm(name="all"), 0))
    run_cell(job, cell, lambda record: None)
    return cell


def closed(users: int, requests: int) -> ClosedOffer:
    return ClosedOffer((Phase(users, float("inf")),), requests)


def every(gap_s: float, count: int) -> OpenOffer:
    arrivals = tuple(Arrival(gap_s * (place + 1)) for place in range(count))
    return OpenOffer(arrivals, gap_s * (count + 1))


class Crowd:
    """Counts who is served at once; answers after a while, and not before `size` were there."""

    def __init__(self, size: int = 1) -> None:
        self.now = 0
        self.most = 0
        self._size = size

    async def __call__(self, exchange: Exchange) -> web.StreamResponse:
        self.now += 1
        self.most = max(self.most, self.now)
        await exchange.begin()
        await asyncio.sleep(0.02)
        await eventually(lambda: self.most >= self._size)
        await exchange.text(1)
        self.now -= 1
        return await exchange.done(1)


def test_a_closed_load_keeps_its_users_busy() -> None:
    crowd = Crowd()
    with scripted_server(crowd) as server:
        cell = run(server, closed(4, 24))
    assert crowd.most == 4
    assert sorted(record.index for record in cell.records) == list(range(24))
    assert all(record.outcome is Outcome.OK for record in cell.records)
    assert cell.window_s == max(record.end_s for record in cell.records)
    assert len({str(body["messages"]) for body in server.bodies}) == 24


def test_a_closed_load_stops_at_its_end_and_waits_for_answers() -> None:
    with scripted_server(answering(2, 1, 0.2)) as server:
        cell = run(server, ClosedOffer((Phase(2, 0.5),), None))
    assert all(record.outcome is Outcome.OK for record in cell.records)
    assert max(record.scheduled_s for record in cell.records) < 0.5
    assert max(record.end_s for record in cell.records) > 0.5
    assert cell.window_s == 0.5 < cell.wall_s


def test_a_swing_changes_the_number_of_users() -> None:
    crowd = Crowd()
    phases = (Phase(1, 0.4), Phase(6, 0.8), Phase(1, 1.2))
    with scripted_server(crowd) as server:
        cell = run(server, ClosedOffer(phases, None))
    assert crowd.most == 6
    ends_s = [phase.until_s for phase in phases]
    at_once = [
        most_at_once([r for r in cell.records if start <= r.scheduled_s < end])
        for start, end in zip([0.0, *ends_s], ends_s, strict=False)
    ]
    assert at_once == [1, 6, 1]


def most_at_once(records: Sequence[RequestRecord]) -> int:
    return max(
        sum(other.scheduled_s <= one.scheduled_s < other.end_s for other in records)
        for one in records
    )


def test_an_open_load_does_not_wait_for_answers() -> None:
    with scripted_server(Crowd(20)) as server:
        cell = run(server, every(0.02, 20))
    assert {record.outcome for record in cell.records} == {Outcome.OK}
    assert [record.scheduled_s for record in sorted(cell.records, key=lambda r: r.index)] == (
        pytest.approx([0.02 * (place + 1) for place in range(20)])
    )


async def _stalls_once(exchange: Exchange) -> web.StreamResponse:
    """The server as a whole stops for a while at the fifth request."""
    if exchange.number == 5:
        time.sleep(STALL_S)  # noqa: ASYNC251  nothing else is served meanwhile
    await exchange.begin()
    await exchange.text(1)
    return await exchange.done(1)


def test_a_stall_shows_in_every_request_that_was_due_meanwhile() -> None:
    """Coordinated omission: requests that were due in the stall count from when they were due."""
    gap_s = 0.03
    with scripted_server(_stalls_once) as server:
        cell = run(server, every(gap_s, 40))
    ordered = sorted(cell.records, key=lambda record: record.index)
    stall_at_s = ordered[5].scheduled_s
    due_meanwhile = [
        record
        for record in ordered
        if stall_at_s < record.scheduled_s < stall_at_s + STALL_S - 2 * gap_s
    ]
    assert len(due_meanwhile) > 10
    for record in due_meanwhile:
        left_s = stall_at_s + STALL_S - record.scheduled_s
        assert record.ttft_s is not None
        assert record.ttft_s > left_s - 0.01, "the wait was not counted"


def test_a_late_sender_is_the_load_tests_fault_and_counts_in_latency() -> None:
    """The load generator itself stalls: its delay is reported, and latencies hold it."""
    offer = every(0.02, 10)
    blocked = threading.Event()

    with scripted_server(answering(1, 1)) as server:
        profile = make_profile()
        target = Target(server.url, "chat", "m")
        job = Job(profile, target, make_prompts(profile.prompts, 0), "run")
        cell = CellRun(Cell(0, 0, Level("level", 1.0, offer), Arm(name="all"), 0))

        def block_once(_: object) -> None:
            if not blocked.is_set():
                blocked.set()
                time.sleep(STALL_S)

        run_cell(job, cell, block_once)
    late = [record for record in cell.records if record.schedule_delay_s > STALL_S / 3]
    assert late
    assert all(record.e2e_s >= record.schedule_delay_s for record in late)


def test_refused_users_come_back_when_told() -> None:
    async def script(exchange: Exchange) -> web.StreamResponse:
        if exchange.number == 0:
            return refusal(503, "full", Retry_After="0.3")
        return await answering(1, 1)(exchange)

    with scripted_server(script) as server:
        cell = run(server, closed(1, 2))
    first, second = cell.records
    assert first.outcome is Outcome.REFUSED
    assert second.outcome is Outcome.OK
    assert second.scheduled_s - first.end_s >= 0.3


def test_one_bad_answer_never_ends_the_run() -> None:
    async def script(exchange: Exchange) -> web.StreamResponse:
        if exchange.number % 4 == 1:
            await exchange.begin()
            await exchange.send(b"data: garbage\n\n")
            return exchange.cut()
        if exchange.number % 4 == 2:
            await exchange.begin()
            exchange.abort()
            return exchange.cut()
        if exchange.number % 4 == 3:
            raise RuntimeError("the server's own fault")
        return await answering(1, 1)(exchange)

    with scripted_server(script) as server:
        cell = run(server, every(0.02, 20))
    outcomes = [record.outcome for record in cell.records]
    assert len(outcomes) == 20
    assert {Outcome.OK, Outcome.BROKEN, Outcome.ERROR} <= set(outcomes)


@pytest.mark.parametrize("offer", [closed(5, 23), every(0.01, 23)])
def test_shards_together_are_the_whole_load(offer: ClosedOffer | OpenOffer) -> None:
    crowd = Crowd()
    with scripted_server(crowd) as server:
        parts = _in_threads(server, offer, 3)
        whole = run(server, offer)
    merged = CellRun(whole.cell)
    ended = []
    merge_into(merged, parts, ended.append)
    assert sorted(record.index for record in merged.records) == list(range(23))
    assert len(ended) == 23
    half = len(server.bodies) // 2
    asked = [sorted(str(b["messages"]) for b in server.bodies[s]) for s in
             (slice(0, half), slice(half, None))]  # fmt: skip
    assert asked[0] == asked[1], "other prompts than without shards"
    assert merged.wall_s == max(part.wall_s for part in parts)


def _in_threads(
    server: ScriptedServer, offer: ClosedOffer | OpenOffer, count: int
) -> Sequence[CellRun]:
    parts: list[CellRun] = []
    threads = [
        threading.Thread(target=lambda i=index: parts.append(run(server, offer, Shard(i, count))))
        for index in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return parts


def test_the_first_worker_alone_watches_the_server() -> None:
    report = {
        "mode": "plain",
        "verifiers": [{"running": 2, "waiting": 1}, {"running": 3, "waiting": 0}],
    }
    with scripted_server(answering(1, 1, 0.0)) as server:
        server.cluster = report
        first = run(server, every(0.1, 3), Shard(0, 2))
        second = run(server, every(0.1, 3), Shard(1, 2))
    assert {(s.mode, s.running, s.waiting) for s in first.samples} == {("plain", 5, 1)}
    assert second.samples == []


def test_another_kind_of_server_is_not_watched() -> None:
    with scripted_server(answering(1, 1)) as server:
        assert run(server, closed(1, 2)).samples == []


def test_the_job_can_travel() -> None:
    """To a Ray worker: everything in it can be pickled."""
    import pickle

    profile = make_profile()
    job = Job(profile, Target("u", "chat", "m"), make_prompts(profile.prompts, 0), "run")
    there = pickle.loads(pickle.dumps(replace(job, shard=Shard(1, 2))))
    assert there.shard == Shard(1, 2)
    assert there.prompts.prompt(4, None) == job.prompts.prompt(4, None)
