"""The command line: `paceline COMMAND`. Exit codes: 0 done, 1 failed, 2 bad usage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

DEFAULT_CONFIG = Path(__file__).parent / "serve" / "local.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return int(arguments.command(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paceline", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the whole system on this machine")
    serve.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="Ray Serve YAML")
    serve.add_argument("--port", type=_port, help="HTTP port, instead of the config's")
    serve.set_defaults(command=_serve)
    return parser


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= 65_535:
        raise argparse.ArgumentTypeError("must be between 1 and 65535")
    return port


def _serve(arguments: argparse.Namespace) -> int:
    from cluster import launcher  # Imports Ray, which the other commands do not need.

    try:
        launcher.run(arguments.config, arguments.port)
    except launcher.LaunchError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
