"""A whole system in the test's process, behind a real port: router, verifier, and a drafter that
runs the verifier's model, so that drafts are accepted."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cluster.config import (
    DrafterConfig,
    KVCacheConfig,
    ModelConfig,
    PathPolicyConfig,
    RouterConfig,
)
from cluster.types import Member
from drafter_service.service import DrafterService
from router.api import create_app
from router.service import RouterService
from tests.support.generation import RunningVerifier, running_verifier
from tests.support.http_server import serve_http
from tests.support.polling import eventually

T = TypeVar("T")

CONNECT_TIMEOUT_S = 60.0
CLIENT_TIMEOUT_S = 540.0
MAX_RUNS = 10
DRAFT_DEADLINE_MS = 60_000.0
"""So long that drafts come in time on a busy machine too."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a client needs to know of it."""

    url: str
    """Without /v1."""
    model: str
    """As clients name it."""
    tokenizer: Path
    """Folder that transformers can load a tokenizer from."""
    router: RouterService

    @property
    def num_accepted_drafts(self) -> int:
        """Of all requests that have ended."""
        return self.router.totals.num_accepted_tokens


async def found_by(
    client: Callable[[Served], Awaitable[T]], model: Path, *, speculative: bool
) -> list[T]:
    """What a client finds out, each time that it is run: with `speculative` until drafts were
    accepted. On a busy machine short answers are over before a drafter has read their prompts."""
    found: list[T] = []
    async with served(model, speculative=speculative) as system:
        while not found or (speculative and not system.num_accepted_drafts):
            assert len(found) < MAX_RUNS, "no draft was accepted"
            found.append(await client(system))
        assert speculative or not system.num_accepted_drafts
    return found


@asynccontextmanager
async def served(model: Path, *, speculative: bool = True) -> AsyncIterator[Served]:
    """Without `speculative` there is no drafter."""
    async with AsyncExitStack() as stack:
        verifier = await stack.enter_async_context(
            running_verifier(
                str(model), dtype="float32", num_blocks=4096, draft_deadline_ms=DRAFT_DEADLINE_MS
            )
        )
        if speculative:
            await _add_drafter(stack, verifier, model)
        policy = PathPolicyConfig(mode="on" if speculative else "off")
        config = RouterConfig(path_policy=policy)
        router = RouterService(config, card=verifier.service.card)
        stack.push_async_callback(router.close)
        router.start()
        router.update_members({verifier.client.member.incarnation: verifier.client.member})
        await eventually(lambda: router.not_ready_reason is None, CONNECT_TIMEOUT_S)
        if speculative:
            await eventually(lambda: bool(router.pool.load().drafters), CONNECT_TIMEOUT_S)
        url = await stack.enter_async_context(serve_http(create_app(router)))
        yield Served(url, verifier.service.card.name, tokenizer_folder(model), router)


async def _add_drafter(stack: AsyncExitStack, verifier: RunningVerifier, model: Path) -> None:
    config = DrafterConfig(
        kind="model",
        model=ModelConfig(source=str(model), dtype="float32"),
        kv_cache=KVCacheConfig(num_blocks=4096),
    )
    drafter = await DrafterService.start(config, host="127.0.0.1")
    stack.push_async_callback(drafter.stop, 0.0)
    member = Member(drafter.incarnation, drafter.address)
    await verifier.use_drafters(member)


def tokenizer_folder(model: Path) -> Path:
    """The model's tokenizer alone, in the class that reads any tokenizer.json."""
    folder = model / "tokenizer-only"
    folder.mkdir(exist_ok=True)
    shutil.copy(model / "tokenizer.json", folder)
    config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


async def run_client(command: Sequence[str | Path], *, cwd: Path, may_ask_hub: bool = False) -> str:
    """What a client program printed; it must end with 0. `may_ask_hub` is for those that take no
    tokenizer from a folder otherwise."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=cwd,
        env=_environment() | ({} if may_ask_hub else {"HF_HUB_OFFLINE": "1"}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(CLIENT_TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    text = output.decode(errors="replace")
    sys.stdout.write(text)
    assert process.returncode == 0, f"it ended with {process.returncode}:\n{text[-6000:]}"
    return text


def _environment() -> dict[str, str]:
    """Ours without what would lead a client to our own packages."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {
        "OPENAI_API_KEY": "none",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
