"""Whether the load test itself can be trusted: did it send what it says, when it says?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.loadtest.cell import OpenOffer
from benchmarks.loadtest.cell_run import CellRun
from benchmarks.loadtest.record import Outcome, RequestRecord

MAX_CPU_SHARE = 0.85
"""Above it the client is late to look at its sockets, and reads its own delays as the server's."""
MIN_DURATION_S = 1.0
"""A shorter cell is mostly the client's own start."""
MAX_GROWTH_S = 0.05
MAX_DELAY_S = 0.1


def faults(run: CellRun) -> list[str]:
    """Why a cell's figures must not be used."""
    found = []
    if run.client_cpu_share > MAX_CPU_SHARE and run.wall_s >= MIN_DURATION_S:
        found.append(
            f"the load generator used {run.client_cpu_share:.0%} of a core, so that its own delays "
            "are in the latencies: use --workers, or less load"
        )
    if isinstance(run.cell.level.offer, OpenOffer):
        found += _schedule_faults(run.records)
    return found


def _schedule_faults(records: Sequence[RequestRecord]) -> list[str]:
    ordered = sorted(records, key=lambda record: record.scheduled_s)
    delays_s = [record.schedule_delay_s for record in ordered]
    quarter = len(delays_s) // 4
    if quarter:
        first, last = map(statistics.median, (delays_s[:quarter], delays_s[-quarter:]))
        if last - first > MAX_GROWTH_S:
            return [
                f"requests were sent ever later than scheduled, {first * 1e3:.0f} ms in the first "
                f"quarter and {last * 1e3:.0f} ms in the last: the load was less than asked for"
            ]
    late = sum(delay_s > MAX_DELAY_S for delay_s in delays_s)
    if late > len(delays_s) / 100:
        return [f"{late} of {len(delays_s)} requests were sent over {MAX_DELAY_S:g} s late"]
    return []


def warnings(run: CellRun) -> list[str]:
    """What weakens a cell's figures."""
    records, title = run.records, run.cell.title
    if run.interrupted:
        return [f"{title}: interrupted after {run.wall_s:.0f} s"]
    ended_well = [record for record in records if record.outcome is Outcome.OK]
    if not ended_well:
        return [f"{title}: no request ended well"]
    found = []
    failed = sum(record.outcome not in (Outcome.OK, Outcome.REFUSED) for record in records)
    if failed:
        found.append(f"{title}: {failed} of {len(records)} requests failed")
    typical_s = statistics.median(record.e2e_s for record in ended_well)
    if run.window_s < 3 * typical_s:
        found.append(
            f"{title}: lasted {run.window_s:.1f} s, less than three requests of {typical_s:.1f} s "
            "one after another; rates depend on how it begins and ends"
        )
    if not any(record.output_tokens for record in ended_well):
        found.append(
            f"{title}: the server counts no output tokens, so there is no TPOT and no rate"
        )
    return found
