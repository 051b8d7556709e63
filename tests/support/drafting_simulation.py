"""Verifiers' and drafters' state machines on a simulated network and clock, by a seed.

Real: the session table, the rounds and their proposals; the draft client, its links, the tries.
Simulated: time, the streams, the engine (a target that is a table of tokens) and the drafter (which
knows the target rather well). Streams lose, repeat, delay and reorder messages, which gRPC's do not
as long as they live, and end at any moment, which they do.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from cluster.config import AheadConfig, SpeculationConfig
from cluster.errors import ERROR_TABLE
from cluster.protocol.messages import (
    DrafterBatch,
    DrafterHello,
    SessionDraft,
    SessionError,
    TargetBatch,
    TargetHello,
)
from cluster.types import Draft, DraftNode, Member, Path, SamplingParams
from drafter_service.scheduler import Limits, Pace, Round, finish_round, plan_round, run_round
from drafter_service.session import SessionTable
from engine.drafting.interface import DraftRequest, DraftSession
from verifier_service.acceptance import verify
from verifier_service.draft_client import DraftClient
from verifier_service.draft_trie import DraftOutcome, DraftTrie
from verifier_service.drafter_link import DrafterLink
from verifier_service.events import (
    DraftArrived,
    DraftCommit,
    DraftOpen,
    DraftOrders,
    DraftSessionLive,
    DraftSessionLost,
    EngineInput,
)
from verifier_service.speculation import Speculation

VOCAB_SIZE = 6
DEPTH = 4
TTL_S = 40.0
TICK_S = 5.0
"""What depends on time alone is done this often, on both sides."""
SETTLING_S = 100.0
"""Longer than any silence or pause that either side waits for."""

ERROR_KINDS = {error.__name__ for error in ERROR_TABLE}


def _mixed(*values: int) -> int:
    return hash(values) & 0xFFFF


def target_token(request_key: int, position: int) -> int:
    """What the target draws there."""
    return _mixed(request_key, position) % (VOCAB_SIZE - 1)


class SimulatedDrafter:
    """A Drafter that is wrong at a third of all positions and foresees half of the corrections.
    Now and then it reads rather than drafts, or raises."""

    def __init__(self, simulation: Simulation) -> None:
        self.sessions: dict[int, tuple[int, list[int]]] = {}
        self._simulation = simulation

    def begin(self, session: DraftSession) -> None:
        self.sessions[session.session_key] = (session.request_key, list(session.token_ids))

    def extend(self, session_key: int, token_ids: Sequence[int]) -> None:
        self.sessions[session_key][1].extend(token_ids)

    def end(self, session_key: int) -> None:
        del self.sessions[session_key]

    def draft(self, requests: Sequence[DraftRequest]) -> list[tuple[DraftNode, ...] | None]:
        simulation, rng = self._simulation, self._simulation.rng
        if rng.random() < simulation.faults.failure:
            raise MemoryError("told to by the simulation")
        return [None if rng.random() < 0.1 else self._nodes(r) for r in requests]

    def _nodes(self, request: DraftRequest) -> tuple[DraftNode, ...]:
        key, token_ids = self.sessions[request.session_key]
        ends = len(token_ids) + _mixed(key, len(token_ids), 3) % 30
        places = range(len(token_ids), min(len(token_ids) + request.num_tokens, ends))
        nodes = [DraftNode(_drafted(key, p), i - 1, 0.7) for i, p in enumerate(places)]
        wrong = [i for i, p in enumerate(places) if _drafted(key, p) != target_token(key, p)]
        for index in wrong[: request.num_branches]:
            parent = index - 1
            if _mixed(key, places[index], 4) % 2:
                for step in range(request.branch_len):
                    position = places[index] + step
                    token_id = _drafted(key, position) if step else target_token(key, position)
                    nodes.append(DraftNode(token_id, parent, 0.3))
                    parent = len(nodes) - 1
        return tuple(nodes)


def _drafted(key: int, position: int) -> int:
    right = target_token(key, position)
    return (right + 1) % VOCAB_SIZE if _mixed(key, position, 5) % 3 == 0 else right


@dataclass(frozen=True)
class Faults:
    """Chances per message, in each direction; and how late a message may be."""

    loss: float = 0.0
    duplication: float = 0.0
    reorder: float = 0.0
    corruption: float = 0.0
    """Of a draft."""
    failure: float = 0.0
    """Of a call of the drafter."""
    max_delay_s: float = 0.01

    @classmethod
    def random(cls, rng: random.Random) -> Faults:
        chances = [rng.choice([0.0, 0.0, 0.02, 0.15]) for _ in range(3)]
        rare = [rng.choice([0.0, 0.0, 0.02]) for _ in range(2)]
        return cls(*chances, *rare, max_delay_s=rng.choice([0.001, 0.05, 3.0]))


class Simulation:
    """The clock, and what is to happen."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.faults = Faults.random(self.rng)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), action))

    def every(self, period_s: float, action: Callable[[], None]) -> None:
        def repeat() -> None:
            action()
            self.at(period_s, repeat)

        self.at(period_s, repeat)

    def run(self, seconds: float, check: Callable[[], None]) -> None:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, action = heapq.heappop(self._events)
            action()
            check()
        self.now = end


class Wire:
    """One direction of a stream."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._latest = 0.0
        self.cut = False

    def send(self, deliver: Callable[[], None]) -> None:
        simulation, rng = self._simulation, self._simulation.rng
        faults = simulation.faults
        if rng.random() < faults.loss:
            return
        for _ in range(1 + (rng.random() < faults.duplication)):
            arrival = simulation.now + rng.random() * faults.max_delay_s
            if rng.random() >= faults.reorder:
                arrival = self._latest = max(arrival, self._latest)
            simulation.at(arrival - simulation.now, lambda: None if self.cut else deliver())


class Host:
    """A drafter's process: its table, and rounds that take a while."""

    def __init__(self, simulation: Simulation, incarnation: str) -> None:
        self.member = Member(incarnation, "127.0.0.1:1")
        self.table = SessionTable(max_sessions=3, ttl_s=TTL_S)
        self.drafter = SimulatedDrafter(simulation)
        self.alive = True
        self.streams: dict[int, SimulatedStream] = {}
        self.num_errors_told = 0
        self._simulation = simulation
        ahead = AheadConfig(lead_tokens=6, branches=2, branch_len=3, max_branching_sessions=2)
        self._limits = Limits(DEPTH, ahead)
        self._computing = False

    def accept(self, stream: SimulatedStream) -> int:
        number = self.table.open_stream()
        self.streams[number] = stream
        return number

    def forget(self, number: int) -> None:
        if self.alive and self.streams.pop(number, None) is not None:
            self.table.close_stream(number)
            self.work()

    def take(self, number: int, batch: TargetBatch) -> None:
        if self.alive and number in self.streams:
            errors = self.table.apply(number, batch, self._simulation.now)
            if errors or self.table.has_news(number):
                self._tell(number, errors)
            self.work()

    def tick(self) -> None:
        if self.alive:
            for number, error in self.table.expire(self._simulation.now):
                self._tell(number, (error,))
            self.work()

    def work(self) -> None:
        """Begin a round if there is something to do."""
        if self._computing or not self.alive:
            return
        planned = plan_round(self.table, self._limits, Pace(), self._simulation.now)
        if planned.operations or planned.tasks:
            self._computing = True
            delay_s = self._simulation.rng.choice([0.0, 0.003, 0.05])
            self._simulation.at(delay_s, lambda: self._finish(planned))

    def _finish(self, planned: Round) -> None:
        self._computing = False
        if self.alive:
            result = run_round(self.drafter, planned)
            outcome = finish_round(self.table, planned, result, self._simulation.now)
            for number, errors in outcome.errors.items():
                self._tell(number, errors)
            self.work()

    def _tell(self, number: int, errors: Sequence[SessionError]) -> None:
        assert {error.kind for error in errors} <= ERROR_KINDS
        self.num_errors_told += len(errors)
        drafts = tuple(map(self._corrupted, self.table.take_drafts(number)))
        if drafts or errors:
            self.streams[number].up(DrafterBatch(drafts=drafts, errors=tuple(errors)))

    def _corrupted(self, item: SessionDraft) -> SessionDraft:
        if self._simulation.rng.random() >= self._simulation.faults.corruption:
            return item
        nodes = (*item.draft.nodes, DraftNode(VOCAB_SIZE, -1, 0.5))
        return item._replace(draft=item.draft._replace(nodes=nodes))


class SimulatedStream:
    """What a draft client holds of a stream."""

    def __init__(self, world: World, link: DrafterLink, host: Host | None) -> None:
        self.link = link
        self.host = host
        self.ended = False
        self._world = world
        self._down, self._up = Wire(world.simulation), Wire(world.simulation)
        self._woken = False
        self._number = -1
        world.simulation.at(0.001, self._shake_hands)

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._world.simulation.at(0.0005, self._flush)

    def end(self) -> None:
        self.ended = self._down.cut = self._up.cut = True
        if self.host is not None and self._number >= 0:
            number, host = self._number, self.host
            self._world.simulation.at(0.002, lambda: host.forget(number))

    def break_off(self, *, refused: bool = False) -> None:
        """It ends by itself."""
        if not self.ended:
            self.end()
            self._world.client.lost(self, "told to by the simulation", refused=refused)

    def up(self, batch: DrafterBatch) -> None:
        self._up.send(lambda: self._world.receive(self, batch))

    def _shake_hands(self) -> None:
        if self.ended:
            return
        if self.host is None or not self.host.alive:
            self.break_off()
            return
        self._number = self.host.accept(self)
        hello = DrafterHello(self.host.member.incarnation, "simulated", "", 3, DEPTH)
        self._world.client.ready(self, hello)
        self.wake()

    def _flush(self) -> None:
        self._woken = False
        if self.ended or self._number < 0:
            return
        batch = self.link.take_batch(self._world.simulation.now)
        if batch != TargetBatch():
            host, number = self.host, self._number
            assert host is not None
            self._down.send(lambda: host.take(number, batch))
        if self.link.has_news:
            self.wake()


@dataclass(eq=False)
class Generation:
    """The engine's state of one sequence: the real trie and speculation."""

    request_key: int
    token_ids: list[int]
    speculation: Speculation
    num_prompt_tokens: int


@dataclass
class Told:
    """What came of every message that a verifier was sent."""

    num_drafts: int = 0
    num_errors: int = 0
    num_after_end: int = 0
    """Drafts for sequences that were over."""
    outcomes: Counter[DraftOutcome] = field(default_factory=Counter)
    num_accepted: int = 0
    num_hits: int = 0


class World:
    """A verifier, some drafters, and what befalls them. It is the draft client's Network too."""

    def __init__(self, seed: int) -> None:
        self.simulation = Simulation(seed)
        self.rng = self.simulation.rng
        self.told = Told()
        self.hosts: dict[str, Host] = {}
        self.past_hosts: list[Host] = []
        self.generations: dict[int, Generation] = {}
        self._num_seqs = count(1)
        self._num_hosts = count(1)
        self._streams: list[SimulatedStream] = []
        self.client = DraftClient(
            SpeculationConfig(), TargetHello("verifier", "target", ""), self.post, self, self.rng
        )
        for _ in range(self.rng.randint(1, 2)):
            self.start_host()
        self.simulation.every(TICK_S, self.tick)

    # --- the client's network ---

    def now(self) -> float:
        return self.simulation.now

    def dial(self, link: DrafterLink, client: DraftClient) -> SimulatedStream:
        stream = SimulatedStream(self, link, self.hosts.get(link.member.incarnation))
        self._streams.append(stream)
        return stream

    def repeat(self, period_s: float, action: Callable[[], None]) -> None:
        self.simulation.every(max(TICK_S, period_s), action)

    async def close(self) -> None:
        raise AssertionError("the simulation does not close its client")

    def receive(self, stream: SimulatedStream, batch: DrafterBatch) -> None:
        """A message reached the verifier."""
        self.told.num_drafts += len(batch.drafts)
        self.told.num_errors += len(batch.errors)
        self.client.received(stream, batch)

    # --- the engine ---

    def post(self, event: EngineInput) -> None:
        """The client speaks to the engine."""
        match event:
            case DraftArrived(seq, draft):
                generation = self.generations.get(seq)
                if generation is None:
                    self.told.num_after_end += 1
                else:
                    self._take_draft(seq, generation, draft)
            case DraftSessionLive(seq, drafter):
                if generation := self.generations.get(seq):
                    generation.speculation.live, generation.speculation.drafter = True, drafter
            case DraftSessionLost(seq):
                if generation := self.generations.get(seq):
                    generation.speculation.live = False

    def _take_draft(self, seq: int, generation: Generation, draft: Draft) -> None:
        speculation = generation.speculation
        assert speculation.trie is not None
        outcome = speculation.trie.insert(draft, speculation.drafter)
        self.told.outcomes[outcome] += 1
        if outcome is DraftOutcome.USED:
            speculation.resynced = False
        elif outcome is DraftOutcome.MALFORMED:
            self.client.apply(DraftOrders(malformed=(seq,)))
        elif outcome is DraftOutcome.UNKNOWN_ANCHOR and not speculation.resynced:
            speculation.resynced = True
            self.client.apply(DraftOrders(resyncs=(seq,)))

    def step(self) -> None:
        """One engine step over all sequences."""
        commits = [self._step(seq, generation) for seq, generation in self.generations.items()]
        self.client.apply(DraftOrders(commits=tuple(commits)))

    def _step(self, seq: int, generation: Generation) -> DraftCommit:
        trie, token_ids = generation.speculation.trie, generation.token_ids
        assert trie is not None
        start = len(token_ids)
        chain = trie.best_chain(DEPTH) if generation.speculation.wanted else ()
        target_ids = [
            target_token(generation.request_key, start + i) for i in range(len(chain) + 1)
        ]
        verification = verify(chain, target_ids)
        assert verification.next_token_id is not None
        num_accepted = verification.num_accepted_tokens
        new_ids = (*chain[:num_accepted], verification.next_token_id)
        token_ids += new_ids
        trie.commit(new_ids)
        self.told.num_accepted += num_accepted
        self.told.num_hits += bool(chain) and trie.has_next(generation.speculation.drafter)
        return DraftCommit(seq, start, new_ids)

    # --- what happens ---

    def open(self) -> None:
        seq = next(self._num_seqs)
        key = self.rng.getrandbits(32)
        prompt = tuple(self.rng.choices(range(VOCAB_SIZE), k=self.rng.randint(1, 5)))
        speculation = Speculation(DEPTH, Path.SPECULATIVE)
        speculation.trie = DraftTrie(prompt, VOCAB_SIZE)
        self.generations[seq] = Generation(key, list(prompt), speculation, len(prompt))
        order = DraftOpen(seq, prompt, len(prompt), key, SamplingParams(), DEPTH)
        self.client.apply(DraftOrders(opens=(order,)))

    def finish(self, seq: int) -> None:
        del self.generations[seq]
        self.client.apply(DraftOrders(closes=(seq,)))

    def switch(self, seq: int) -> None:
        speculation = self.generations[seq].speculation
        plain = speculation.path is Path.SPECULATIVE
        speculation.path = Path.PLAIN if plain else Path.SPECULATIVE
        self.client.apply(DraftOrders(pauses=(seq,)) if plain else DraftOrders(resumes=(seq,)))

    def start_host(self) -> None:
        host = Host(self.simulation, f"drafter-{next(self._num_hosts)}")
        self.hosts[host.member.incarnation] = host
        self._tell_members()

    def stop_host(self, incarnation: str) -> None:
        """As SIGKILL does."""
        host = self.hosts.pop(incarnation)
        host.alive = False
        self.past_hosts.append(host)
        for stream in list(host.streams.values()):
            self.simulation.at(self.rng.random() * 0.1, stream.break_off)
        self._tell_members()

    def _tell_members(self) -> None:
        self.client.update_members({name: host.member for name, host in self.hosts.items()})

    def tick(self) -> None:
        for host in self.hosts.values():
            host.tick()

    def act(self) -> None:
        """Something, at random."""
        seqs = list(self.generations)
        match self.rng.randrange(20):
            case 0 | 1 if len(seqs) < 4:
                self.open()
            case 2 if seqs:
                self.finish(self.rng.choice(seqs))
            case 3 if seqs:
                self.switch(self.rng.choice(seqs))
            case 4 if self._streams and self.rng.random() < 0.3:
                self.rng.choice(self._streams).break_off()
            case 5 if self.hosts and self.rng.random() < 0.3:
                self.stop_host(self.rng.choice(list(self.hosts)))
                self.simulation.at(self.rng.choice([0.0, 2.0]), self.start_host)
            case _:
                self.step()

    # --- laws ---

    def check(self) -> None:
        """After every event: neither side has other tokens than the other, whatever was lost."""
        for host in self.hosts.values():
            for session in host.table.sessions:
                told = host.streams[session.stream].link.sessions.get(session.number)
                if told is not None and told.epoch == session.epoch:
                    num_tokens = len(session.token_ids)
                    assert num_tokens <= told.told_len, "it knows what it was not told"
                    assert session.token_ids.tolist() == told.token_ids[:num_tokens]

    def check_story(self) -> None:
        """Every message had one outcome, which has a name."""
        told, counters = self.told, self.client.counters
        named = counters.stale_epochs + counters.unknown_sessions + counters.surplus_drafts
        judged = sum(told.outcomes.values()) + told.num_after_end
        assert set(told.outcomes) <= set(DraftOutcome)
        assert counters.drafts == judged
        assert told.num_drafts + told.num_errors == judged + named + counters.session_errors

    def check_tokens(self) -> None:
        """The law."""
        for generation in self.generations.values():
            start = generation.num_prompt_tokens
            assert generation.token_ids[start:] == [
                target_token(generation.request_key, position)
                for position in range(start, len(generation.token_ids))
            ]

    def settle(self) -> None:
        """Time passes in calm until nothing is awaited any more."""
        deadline = self.now() + SETTLING_S
        while waiting := self._waiting_for():
            assert self.now() < deadline, waiting
            self.simulation.run(1.0, self.check)

    def _waiting_for(self) -> str:
        """What is to come yet. Every session that a drafter serves is to be answered or have its
        chain, and none is to be without a drafter but where all are full or will not have it."""
        for seq, generation in self.generations.items():
            session = self.client._sessions[seq]
            if session.paused:
                continue
            if session.link is None:
                links = self.client._links.values()
                if any(link.can_take(session, self.now()) for link in links):
                    return f"a drafter for {seq}"
            elif session.asked or not generation.speculation.live:
                return f"an answer for {seq}"
            elif not generation.speculation.settled:
                return f"a chain for {seq}"
        return ""

    def check_freed(self) -> None:
        """Nothing is left of any session, on either side."""
        assert self.client.num_sessions == 0
        assert not self.client._waiting
        for link in self.client._links.values():
            assert not link.sessions
            assert not link.has_news
            assert not link._known
        for host in self.hosts.values():
            assert len(host.table) == 0
            assert not list(host.table.owing)
            assert host.table.num_operations == 0
            assert not host.drafter.sessions
            assert not any(host.table.has_news(number) for number in host.streams)


def live(seed: int, num_acts: int = 14) -> World:
    """A whole life: faults, then calm, then the end; every law is checked."""
    world = World(seed)
    simulation = world.simulation
    for _ in range(2):
        world.open()
    for _ in range(num_acts):
        simulation.run(simulation.rng.choice([0.002, 0.02, 0.2]), world.check)
        world.act()
        world.check()
    simulation.faults = Faults()
    if not world.hosts:
        world.start_host()
    for _ in range(3):
        world.settle()
        world.step()
    world.settle()
    world.check_tokens()
    for seq in list(world.generations):
        world.finish(seq)
    simulation.run(2 * TTL_S, world.check)
    world.check_freed()
    world.check_story()
    return world
