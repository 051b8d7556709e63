"""`paceline status`: GET /v1/cluster for a person."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from cluster.commands.api_client import ApiClient, ApiError, Json
from cluster.commands.terminal import CLEAR

WATCH_PERIOD_S = 1.0
_ID_LEN = 8

Column = tuple[str, Callable[[Json], str]]


def run(client: ApiClient, *, watch: bool, as_json: bool) -> None:
    """Print the report, with `watch` every second until interrupted. Raises ApiError if there is
    none; while watching, only if there is none to begin with."""
    print(_report(client, as_json))
    while watch:
        sys.stdout.flush()
        time.sleep(WATCH_PERIOD_S)
        try:
            text = _report(client, as_json)
        except ApiError as error:
            print(f"paceline: {error}", file=sys.stderr)
            continue
        print(CLEAR + text if sys.stdout.isatty() else text)


def _report(client: ApiClient, as_json: bool) -> str:
    body = client.get("/v1/cluster")
    report = client.parse(body)
    try:
        text = render(report)
    except (KeyError, TypeError, ValueError):
        raise client.unexpected() from None
    return body if as_json else text


def render(report: Json) -> str:
    """The report as text. Raises KeyError, TypeError or ValueError if it is none."""
    parts = [
        f"{report['mode']} for {_duration(report['since_s'])}: {report['reason']}",
        _acceptance_by_position(report["acceptance_per_position"]),
        _table("router", report["routers"], _ROUTER_COLUMNS, "no router"),
        _table("verifier", report["verifiers"], _VERIFIER_COLUMNS, "no verifier runs"),
        _table("drafter", report["drafters"], _DRAFTER_COLUMNS, "no drafter runs"),
    ]
    return "\n\n".join(parts) + "\n"


def _acceptance_by_position(rates: Sequence[float]) -> str:
    """Over the requests that have ended."""
    if not rates:
        return "no drafts verified yet"
    return "drafts accepted, by position: " + " ".join(f"{rate:.0%}" for rate in rates)


def _table(kind: str, rows: Sequence[Json], columns: Sequence[Column], if_empty: str) -> str:
    if not rows:
        return if_empty
    lines = [[kind.upper(), *(title for title, _ in columns)]]
    lines += [[_short(row["replica_id"]), *(cell(row) for _, cell in columns)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_aligned(line, widths) for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(map(str.ljust, line, widths)).rstrip()


def _field(name: str) -> Callable[[Json], str]:
    return lambda row: _value(row[name])


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return "-" if value in (None, "") else str(value)


def _short(identifier: str) -> str:
    return identifier[:_ID_LEN] or "-"


def _kv_use(row: Json) -> str:
    return f"{row['kv_blocks_used']}/{row['kv_blocks_total']}"


def _acceptance(row: Json) -> str:
    rate = row["acceptance_rate"]
    return "-" if rate is None else f"{rate:.1%}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3_600:.0f} h"


_ROUTER_COLUMNS: tuple[Column, ...] = (
    ("READY", lambda row: "yes" if row["ready"] else "no"),
    ("IN FLIGHT", _field("in_flight")),
    ("NODE", lambda row: _short(row["node_id"])),
    ("PID", _field("pid")),
)
_VERIFIER_COLUMNS: tuple[Column, ...] = (
    ("STATE", _field("state")),
    ("RUNNING", _field("running")),
    ("WAITING", _field("waiting")),
    ("KV BLOCKS", _kv_use),
    ("STEP MS", _field("step_ms")),
    ("KNEE", _field("knee_tokens")),
    ("MODEL", _field("model")),
    ("ADDRESS", _field("address")),
)
_DRAFTER_COLUMNS: tuple[Column, ...] = (
    ("STATE", _field("state")),
    ("SESSIONS", _field("sessions")),
    ("TOKENS/S", _field("tokens_per_s")),
    ("QUEUE MS", _field("queue_ms")),
    ("RTT MS", _field("rtt_ms")),
    ("ACCEPTED", _acceptance),
    ("MODEL", _field("model")),
    ("ADDRESS", _field("address")),
)
