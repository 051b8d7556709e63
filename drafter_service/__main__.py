"""A drafter as a plain process, without Ray: `python -m drafter_service --port 7070`, or with a
model `python -m drafter_service --kind model --model SOURCE`.

SIGTERM and SIGINT drain it: open sessions are served for at most `drain_grace_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

import yaml

from cluster.config import DrafterConfig
from drafter_service.service import DrafterService


async def serve(args: argparse.Namespace) -> None:
    """Run until a signal, then drain."""
    config = _config(args)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    service = await DrafterService.start(config, host=args.host, incarnation=args.incarnation)
    print(f"listening on {service.address}", flush=True)
    await stop.wait()
    await service.stop(config.drain_grace_s)


def _config(args: argparse.Namespace) -> DrafterConfig:
    """The file's settings, with those of the command line over them."""
    settings = (yaml.safe_load(args.config.read_text()) if args.config else None) or {}
    if args.kind:
        settings["kind"] = args.kind
    if args.model:
        settings["model"] = {**(settings.get("model") or {}), "source": args.model}
    return DrafterConfig.model_validate({**settings, "rpc": {"port": args.port}})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m drafter_service", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--config", type=Path, help="YAML file with the Drafter's configuration")
    parser.add_argument("--kind", choices=("ngram", "suffix", "model"), help="how drafts are made")
    parser.add_argument(
        "--model", metavar="SOURCE", help="draft model: hub id, folder, .gguf file or embedded"
    )
    parser.add_argument("--incarnation", help="name of this life; random if not given")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
