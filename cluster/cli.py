"""The command line: `paceline COMMAND`. Exit codes: 0 done, 1 failed, 2 bad usage.

Commands that need more than this package may know are brought by the packages that own them, as
entry points of the group `paceline.commands`: each is a function that adds its parser and sets
`command` to what runs it, a function of the parsed arguments that says whether it succeeded.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit

from cluster.commands import chat, status
from cluster.commands.api_client import DEFAULT_URL, ApiClient
from cluster.commands.command_error import CommandError

COMMANDS = "paceline.commands"
DEFAULT_CONFIG = Path(__file__).parent / "serve" / "local.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        succeeded = arguments.command(arguments)
        sys.stdout.flush()
    except CommandError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1
    except BrokenPipeError:  # Whoever read our output has gone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0 if succeeded else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paceline", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the whole system on this machine")
    serve.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="Ray Serve YAML")
    serve.add_argument("--port", type=_port, help="HTTP port, instead of the config's")
    serve.set_defaults(command=_serve)

    show = commands.add_parser("status", help="show mode, load and members of a running system")
    _add_url(show)
    show.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    show.add_argument("--json", action="store_true", help="print the body of GET /v1/cluster")
    show.set_defaults(command=_status)

    talk = commands.add_parser("chat", help="talk to the model of a running system")
    _add_url(talk)
    talk.add_argument("prompt", nargs="?", metavar="PROMPT", help="without it, a conversation")
    talk.set_defaults(command=_chat)

    for brought in sorted(entry_points(group=COMMANDS), key=lambda entry: entry.name):
        brought.load()(commands)
    return parser


def _add_url(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", type=_url, default=DEFAULT_URL, help="router (%(default)s)")


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= 65_535:
        raise argparse.ArgumentTypeError("must be between 1 and 65535")
    return port


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # A port that is none.
        fits = False
    if not fits:
        raise argparse.ArgumentTypeError(f"must look like {DEFAULT_URL}")
    return text


def _serve(arguments: argparse.Namespace) -> bool:
    from cluster import launcher  # Imports Ray, which the other commands do not need.

    launcher.run(arguments.config, arguments.port)
    return True


def _status(arguments: argparse.Namespace) -> bool:
    client = ApiClient(arguments.url)
    if not arguments.watch:
        status.run(client, watch=False, as_json=arguments.json)
        return True
    with contextlib.suppress(KeyboardInterrupt):
        status.run(client, watch=True, as_json=arguments.json)
    return True


def _chat(arguments: argparse.Namespace) -> bool:
    return chat.run(ApiClient(arguments.url), arguments.prompt)


if __name__ == "__main__":
    sys.exit(main())
