"""A real Generation server that plays scripts, and a tiny model card to tokenize with."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from grpc import StatusCode
from tokenizers import decoders, models, pre_tokenizers, trainers

from cluster.load import DrafterLoad, DrafterState, VerifierLoad
from cluster.protocol import codec, generation_pb2_grpc
from cluster.protocol.messages import (
    NOISE_VERSION,
    PROTOCOL_VERSION,
    SetPath,
    VerifierBatch,
    VerifierHello,
)
from cluster.rpc import RpcServer, new_incarnation, start_rpc_server
from cluster.types import (
    ErrorEvent,
    FinishEvent,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Member,
    ModelCard,
    PromptLogprobsEvent,
    SpeculationStats,
    TokenLogprobs,
    TokensEvent,
)

PROMPT_CHUNK_TOKENS = 4
"""Of which log probabilities are told in one step."""
SERVICE = "paceline.generation.v1.Generation"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def make_card(**changes: Any) -> ModelCard:
    """Card of a byte-level model in ChatML; its merges come from one sentence."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 9, trainer)
    tokenizer.add_tokens(["<think>"])
    fields = {
        "name": "tiny",
        "max_model_len": 512,
        "vocab_size": tokenizer.get_vocab_size(),
        "vocabulary": "tiny-vocabulary",
        "fingerprint": "tiny-fingerprint",
        "eos_token_ids": (tokenizer.token_to_id("<|im_end|>"),),
        "tokenizer_json": tokenizer.to_str(),
        "chat_template": CHAT_TEMPLATE,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    return ModelCard(**(fields | changes))


def sentencepiece_tokenizer_json() -> str:
    """A tokenizer of the other family: U+2581 for a space, bytes as <0xAB>."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [f"<0x{byte:02X}>" for byte in range(256)]:
        vocabulary[token] = len(vocabulary)
    for token in ["\u2581", "a", "b", "\u2581a", "ab"]:
        vocabulary[token] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("\u2581", "a"), ("a", "b")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    described = json.loads(tokenizer.to_str())
    described["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    return json.dumps(described)


@dataclass(frozen=True, slots=True)
class Step:
    """What one engine step makes final."""

    token_ids: tuple[int, ...]
    num_draft_tokens: int = 0
    """The first of the ids were drafts: all of them but the last, at most this many."""
    error: ErrorEvent | None = None
    """Fail the request in this step instead."""
    num_cached_prompt_tokens: int = 0
    """Told with these ids; only the first step's means anything."""


def scripted_logprobs(token_ids: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """Of the token with id i: -i / 8, and beside it the next ids, each by 1 less likely."""
    if num_top is None:
        return ()
    return tuple(
        TokenLogprobs(
            -token_id / 8,
            tuple(token_id + rank for rank in range(num_top)),
            tuple(-token_id / 8 - rank for rank in range(num_top)),
        )
        for token_id in token_ids
    )


Script = Callable[[GenerationRequest], Iterable[Step]]


def blocks(token_ids: Sequence[int], size: int = 1) -> list[Step]:
    """Steps of `size` tokens each, whose tokens but the last are accepted drafts."""
    cuts = range(0, len(token_ids), size)
    return [Step(tuple(token_ids[cut : cut + size]), size - 1) for cut in cuts]


def saying(text: str, size: int = 1, *, ends: bool = True, card: ModelCard | None = None) -> Script:
    """A script that says `text` in tokens of the card, then the end of sequence."""
    card = card or make_card()
    token_ids = tokenizers.Tokenizer.from_str(card.tokenizer_json).encode(text).ids
    said = token_ids + list(card.eos_token_ids) if ends else token_ids
    return lambda request: blocks(said, size)


def endless(size: int = 1) -> Script:
    """A script that says letters for ever, which ones depends on the request's key."""

    def script(request: GenerationRequest) -> Iterator[Step]:
        letters = tokenizers.Tokenizer.from_str(make_card().tokenizer_json).encode("abcdefgh").ids
        ids = [letters[(request.request_key >> (i % 60)) % len(letters)] for i in range(4096)]
        yield from blocks(ids, size)

    return script


@dataclass
class Running:
    """A submitted request and where its script stands."""

    request: GenerationRequest
    steps: Iterator[Step]
    num_tokens: int
    num_steps: int = 0
    drafted: list[int] = field(default_factory=list)
    skip: int = 0
    num_scored: int = 1
    """Prompt tokens whose log probabilities need not be told any more."""


class Connection:
    """One router's stream."""

    def __init__(self) -> None:
        self.running: dict[str, Running] = {}
        self.outbox: asyncio.Queue[VerifierBatch | None] = asyncio.Queue()


class ScriptedVerifier(generation_pb2_grpc.GenerationServicer):
    """Plays `script` for every request: one step of each every `step_s`.

    Ends a generation at the card's end of sequence, a stop token or max_tokens, inside a block too.
    """

    def __init__(self, script: Script, *, step_s: float = 0.0, card: ModelCard | None = None):
        self.script = script
        self.step_s = step_s
        self.card = card or make_card()
        self.incarnation = new_incarnation()
        self.hello = VerifierHello(
            self.incarnation, self.card.fingerprint, PROTOCOL_VERSION, NOISE_VERSION
        )
        self.load: VerifierLoad | None = None
        """Reported instead of the true load."""
        self.drafters: tuple[DrafterLoad, ...] = ()
        self.submitted: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.set_paths: list[SetPath] = []
        self.num_messages_received = self.num_messages_that_submit = 0
        self.load_intervals_ms: list[int] = []
        """Asked for, in order."""
        self.paused = False
        self._connections: set[Connection] = set()
        self._server: RpcServer | None = None
        self._stepping: asyncio.Task[None] | None = None

    # --- life ---

    async def start(self, port: int = 0) -> ScriptedVerifier:
        self._server = await start_rpc_server(
            lambda server: generation_pb2_grpc.add_GenerationServicer_to_server(self, server),
            SERVICE,
            host="127.0.0.1",
            port=port,
        )
        self._stepping = asyncio.create_task(self._step_for_ever())
        return self

    async def kill(self) -> None:
        """Vanish without a word. Idempotent."""
        if self._stepping is not None:
            self._stepping.cancel()
        for connection in self._connections:
            connection.running.clear()
        if self._server is not None:
            await self._server.server.stop(0)
            self._server = None

    def ready_drafter(self, kind: str = "") -> None:
        """Report one drafter that is ready."""
        self.drafters = (DrafterLoad("drafter-1", DrafterState.READY, kind=kind),)

    def drain(self) -> None:
        """Ask every router to submit nothing more."""
        for connection in self._connections:
            connection.outbox.put_nowait(VerifierBatch(drain=True))

    @property
    def member(self) -> Member:
        assert self._server is not None
        return self.member_at(self._server.address)

    def member_at(self, address: str) -> Member:
        """As it is announced, before it listens there too."""
        return Member(
            incarnation=self.incarnation,
            address=address,
            replica_id=f"replica-{self.incarnation[:4]}",
            node_id="node",
            pid=1,
            model=self.card.name,
            fingerprint=self.card.fingerprint,
        )

    @property
    def num_running(self) -> int:
        return sum(len(connection.running) for connection in self._connections)

    @property
    def most_tokens_told(self) -> int:
        """Of a request that runs."""
        running = [one for connection in self._connections for one in connection.running.values()]
        return max((one.num_tokens for one in running), default=0)

    # --- the wire ---

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        hello = codec.decode_router_batch(await anext(request_iterator)).hello
        if hello is None or hello.fingerprint != self.card.fingerprint:
            await context.abort(StatusCode.FAILED_PRECONDITION, "another model is served here")
        connection = Connection()
        self._connections.add(connection)
        reading = asyncio.create_task(self._read(request_iterator, connection))
        try:
            first = VerifierBatch(hello=self.hello, load=self._load())
            yield codec.encode_verifier_batch(first)
            while (batch := await connection.outbox.get()) is not None:
                yield codec.encode_verifier_batch(batch)
        finally:
            reading.cancel()
            self._connections.discard(connection)

    async def _read(self, messages: Any, connection: Connection) -> None:
        async for message in messages:
            self.num_messages_received += 1
            batch = codec.decode_router_batch(message)
            self.num_messages_that_submit += bool(batch.submits)
            for request in batch.submits:
                self.submitted.append(request)
                connection.running[request.request_id] = Running(
                    request,
                    iter(self.script(request)),
                    num_tokens=len(request.resumed_ids),
                    skip=len(request.resumed_ids),
                )
            for request_id in batch.cancels:
                self.cancelled.append(request_id)
                connection.running.pop(request_id, None)
            self.set_paths += batch.set_paths
            if batch.load_interval_ms:
                self.load_intervals_ms.append(batch.load_interval_ms)
        connection.outbox.put_nowait(None)

    # --- the steps ---

    async def _step_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.step_s if self.num_running and not self.paused else 0.01)
            for connection in self._connections:
                events = [] if self.paused else self._step(connection)
                connection.outbox.put_nowait(VerifierBatch(events=tuple(events), load=self._load()))

    def _step(self, connection: Connection) -> list[GenerationEvent]:
        events: list[GenerationEvent] = []
        for request_id, running in list(connection.running.items()):
            made = list(self._advance(running))
            events += made
            if made and isinstance(made[-1], FinishEvent | ErrorEvent):
                del connection.running[request_id]
        return events

    def _advance(self, running: Running) -> Iterator[GenerationEvent]:
        request = running.request
        if request.num_prompt_logprobs is not None and (ids := self._next_scored(running)):
            logprobs = scripted_logprobs(ids, request.num_prompt_logprobs)
            yield PromptLogprobsEvent(request.request_id, running.num_scored, logprobs)
            running.num_scored += len(ids)
            return
        if request.max_tokens == 0:
            yield FinishEvent(request.request_id, FinishReason.LENGTH, self._stats(running))
            return
        step = next(running.steps, None)
        while step is not None and running.skip >= len(step.token_ids) and not step.error:
            running.skip -= len(step.token_ids)
            step = next(running.steps, None)
        if step is None:
            yield FinishEvent(request.request_id, FinishReason.STOP, self._stats(running))
            return
        if step.error is not None:
            yield ErrorEvent(
                request.request_id, step.error.kind, step.error.message, step.error.param
            )
            return
        skipped, running.skip = running.skip, 0
        token_ids, reason = self._cut(request, step.token_ids[skipped:], running.num_tokens)
        num_accepted = min(len(step.token_ids) - 1, step.num_draft_tokens)
        drafted = [index < num_accepted for index in range(len(step.token_ids))][skipped:]
        running.num_steps += 1
        yield TokensEvent(
            request.request_id,
            running.num_tokens,
            token_ids,
            tuple(drafted[: len(token_ids)]),
            step.num_draft_tokens,
            num_cached_prompt_tokens=step.num_cached_prompt_tokens,
            logprobs=scripted_logprobs(token_ids, request.num_top_logprobs),
        )
        running.num_tokens += len(token_ids)
        if reason is not None:
            yield FinishEvent(request.request_id, reason, self._stats(running))

    def _next_scored(self, running: Running) -> tuple[int, ...]:
        """One chunk of the prompt a step."""
        first = running.num_scored
        return running.request.prompt_ids[first : first + PROMPT_CHUNK_TOKENS]

    def _cut(
        self, request: GenerationRequest, token_ids: tuple[int, ...], done: int
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """The ids up to the first that ends the generation: stop before length."""
        ends = set(request.stop_token_ids)
        if not request.ignore_eos:
            ends.update(self.card.eos_token_ids)
        for count, token_id in enumerate(token_ids, start=1):
            if token_id in ends:
                return token_ids[:count], FinishReason.STOP
            if done + count == request.max_tokens:
                return token_ids[:count], FinishReason.LENGTH
        return token_ids, None

    def _stats(self, running: Running) -> SpeculationStats:
        return SpeculationStats(drafter="scripted", num_steps=running.num_steps)

    def _load(self) -> VerifierLoad:
        return self.load or VerifierLoad(
            running=self.num_running, kv_blocks_total=64, drafters=self.drafters
        )
