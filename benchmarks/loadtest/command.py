"""The command line of `paceline loadtest`. What it runs is imported when it runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cluster.commands.api_client import DEFAULT_URL, KEY_VARIABLE


def add_command(commands: Any) -> None:
    """Add the parser. Bad usage ends the process with exit code 2, as argparse does."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "loadtest",
        help="load a server in a known way and report what it did",
        description=(
            "Loads an OpenAI-compatible server and writes results.json, requests.jsonl and "
            "report.html into --out. With --compare and without --profile, the run in --out is "
            "reported again, beside the other one."
        ),
    )
    parser.add_argument("--url", type=_url, default=DEFAULT_URL, help="server (%(default)s)")
    parser.add_argument("--profile", metavar="FILE|NAME", help="what to do; --list shows names")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for what was found")
    parser.add_argument("--compare", type=Path, metavar="DIR", help="--out of an earlier run")
    parser.add_argument(
        "--workers", type=_natural, default=0, help="spread over a Ray cluster, so many actors"
    )
    parser.add_argument("--seed", type=_natural, help="instead of the profile's")
    parser.add_argument("--model", help="instead of the profile's, or the server's first")
    parser.add_argument(
        "--api-key", default=os.environ.get(KEY_VARIABLE), help=f"or ${KEY_VARIABLE}"
    )
    parser.add_argument("--list", action="store_true", help="show the profiles that come along")

    def run(arguments: argparse.Namespace) -> bool:
        from benchmarks.loadtest import load_test

        if arguments.list:
            load_test.list_profiles()
            return True
        if arguments.out is None:
            parser.error("--out is needed: a folder for what was found")
        if arguments.profile is None and arguments.compare is None:
            parser.error("--profile is needed: a YAML file, or a name that --list shows")
        if arguments.profile is None:
            return load_test.report_again(arguments.out, arguments.compare)
        return load_test.run(arguments)

    parser.set_defaults(command=run)


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return number


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # A port that is none.
        fits = False
    if not fits:
        raise argparse.ArgumentTypeError(f"must look like {DEFAULT_URL}")
    return text.rstrip("/").removesuffix("/v1")
