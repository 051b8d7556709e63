"""GET / in plain HTML: what runs here, read from /v1/cluster."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from cluster.members_service import RouterStatus
from router.cluster_report import cluster_report
from router.service import RouterService

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5">
<title>Paceline</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse}}td,th{{padding:.2rem .8rem .2rem 0;text-align:left}}</style>
</head><body><h1>Paceline</h1>
<p>{ready}</p><p>Auto requests are <b>{mode}</b> since {since_s:.0f} s: {reason}</p>
<h2>Verifiers</h2>{verifiers}<h2>Drafters</h2>{drafters}
<p><a href="/docs">API</a> · <a href="/v1/cluster">cluster as JSON</a> ·
<a href="/v1/models">models</a></p></body></html>
"""

_VERIFIER_COLUMNS = ("address", "model", "state", "running", "waiting", "step_ms")
_DRAFTER_COLUMNS = ("address", "model", "state", "sessions", "tokens_per_s", "acceptance_rate")


def status_page(service: RouterService, routers: Mapping[str, RouterStatus]) -> str:
    """The page, as of now. `routers`: what the others told, by incarnation."""
    report = cluster_report(service, routers)
    reason = service.not_ready_reason
    return _PAGE.format(
        ready="Ready." if reason is None else f"Not ready: {html.escape(reason)}",
        mode=report["mode"],
        since_s=report["since_s"],
        reason=html.escape(report["reason"]),
        verifiers=_table(report["verifiers"], _VERIFIER_COLUMNS),
        drafters=_table(report["drafters"], _DRAFTER_COLUMNS),
    )


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
    if not rows:
        return "<p>None.</p>"
    head = "".join(f"<th>{column}</th>" for column in columns)
    lines = [
        "".join(f"<td>{html.escape(str(row[column]))}</td>" for column in columns) for row in rows
    ]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
