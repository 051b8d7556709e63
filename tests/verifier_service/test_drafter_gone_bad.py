"""N7: a drafter whose weights go bad at run time. It shakes hands, answers in time and breaks no
rule, and nothing of what it says is accepted. It is left alone, tried now and then, and used again
when it is good again; and nothing of that shows in an answer."""

from __future__ import annotations

import random
from types import SimpleNamespace

from cluster.config import SpeculationConfig
from cluster.load import DrafterState
from cluster.types import GenerationRequest, Path, SamplingParams
from tests.support.expositions import total
from tests.support.generation import running_verifier
from tests.support.in_process_drafter import InProcessDrafting
from tests.support.polling import until
from tests.support.scripted_drafter import ScriptedDrafter, oracle
from tests.support.scripted_target import VOCAB_SIZE, ScriptedRunner, hashed_law
from tests.support.tiny_models import make_tiny_model
from verifier_service import engine
from verifier_service.acceptance_breaker import (
    MAX_PROBE_REFUSALS,
    MAX_PROBE_SESSIONS,
    MAX_REFUSALS,
)
from verifier_service.planner import StepProfile
from verifier_service.recorders import Fallback

HASHED = hashed_law(salt="gone bad")
DEPTH = 4
NUM_SEQUENCES = 4
NUM_TOKENS = 40
FIRST_PAUSE_S = 0.02
RISING = StepProfile({1: 1.0, 2: 1.4, 3: 1.8, 5: 2.6, 64: 30.0})
"""ms of a step by its tokens: a draft must be accepted every other time to be worth its place."""


def wrong(token_ids, vocab_size):
    return [(token_id + 1) % vocab_size for token_id in token_ids]


class TimedRunner(ScriptedRunner):
    """Its steps take what the profile says, on a clock of their own."""

    now_s = 0.0

    def forward(self, slices):
        self.now_s += (0.6 + 0.4 * sum(len(part.token_ids) for part in slices)) / 1e3
        return super().forward(slices)


def law(prefix):
    """Looks at the end alone, so that a long sequence costs no more than a short one."""
    return HASHED((len(prefix), *prefix[-3:]))


def right_drafts(committed, depth):
    token_ids = list(committed)
    for _ in range(depth):
        logits = law(token_ids)
        token_ids.append(logits.index(max(logits)))
    return token_ids[len(committed) :]


def wrong_drafts(committed, depth):
    return wrong(right_drafts(committed, depth), VOCAB_SIZE)


class Gone:
    """Four sequences at any time and one drafter, whose weights this test replaces."""

    def __init__(self, monkeypatch, profile):
        runner = TimedRunner(law, num_blocks=64, block_size=16)
        monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: runner.now_s))
        speculation = SpeculationConfig(
            num_speculative_tokens=DEPTH, local_drafters=(), connect_backoff_s=FIRST_PAUSE_S
        )
        self.driver = InProcessDrafting(
            runner, lambda: runner.now_s, right_drafts, speculation, profile
        )
        self.client = self.driver.client

    @property
    def state(self):
        (load,) = self.client.loads()
        return load.state

    def step(self):
        """A sequence begins for each that has ended."""
        results = self.driver.results
        for number in range(NUM_SEQUENCES - sum(not one.ended for one in results.values())):
            prompt = [3, 4, (len(results) + number) % VOCAB_SIZE]
            self.driver.submit(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
        self.driver.step()

    def verdicts(self, num_steps):
        """Of so many steps."""
        start = len(self.driver.verdicts)
        for _ in range(num_steps):
            self.step()
        return self.driver.verdicts[start:]

    def until(self, condition, num_steps):
        """Step until it holds; gives the verdicts of that time."""
        start = len(self.driver.verdicts)
        for _ in range(num_steps):
            if condition():
                return self.driver.verdicts[start:]
            self.step()
        raise AssertionError(f"not within {num_steps} steps")

    def check_answers(self):
        for seq, result in self.driver.results.items():
            assert result.error is None
            prompt = self.driver.requests[seq].prompt_ids
            assert result.token_ids == right_drafts(prompt, len(result.token_ids))


def num_accepted(verdicts):
    """Of first drafts."""
    return sum(verdict.num_accepted_tokens > 0 for verdict in verdicts)


def test_it_is_left_alone_then_costs_probes_and_comes_back(monkeypatch, caplog):
    caplog.set_level("INFO", "verifier_service.draft_client")
    gone = Gone(monkeypatch, profile=None)
    driver, client = gone.driver, gone.client
    good = gone.verdicts(50)
    assert num_accepted(good) == len(good) > 150
    assert gone.state is DrafterState.READY

    driver.continuation = wrong_drafts
    bad = gone.until(lambda: client.counters.times_distrusted, 100)
    assert len(bad) - num_accepted(bad) <= MAX_REFUSALS + NUM_SEQUENCES
    assert gone.state is DrafterState.DISTRUSTED
    assert not driver.open_sessions
    assert client.recorder.fallbacks[Fallback.DISTRUSTED] == NUM_SEQUENCES
    assert (
        f"is left alone for 0.02 s: of {MAX_REFUSALS} first drafts 0 were accepted" in caplog.text
    )

    probes, num_sessions = [], set()
    for _ in range(250):
        probes += gone.verdicts(1)
        num_sessions.add(len(driver.open_sessions))
    num_probes = client.counters.times_distrusted - 1
    assert 2 <= num_probes <= 6
    assert len(probes) <= (num_probes + 1) * (MAX_PROBE_REFUSALS + NUM_SEQUENCES)
    assert max(num_sessions) == MAX_PROBE_SESSIONS

    driver.continuation = right_drafts
    gone.until(lambda: "is trusted again" in caplog.text, 2_000)
    assert gone.state is DrafterState.READY
    again = gone.verdicts(50)
    assert num_accepted(again) == len(again) > 150
    gone.check_answers()


def test_with_a_planner_that_has_its_own_opinion_it_costs_no_more_and_comes_back(monkeypatch):
    """A planner that expects nothing of a drafter asks it for nothing, and then nobody sees that it
    is good again. The breaker does not stay half open for that, and the planner asks again."""
    gone = Gone(monkeypatch, RISING)
    driver, counters = gone.driver, gone.client.counters
    good = gone.verdicts(100)[20:]
    assert num_accepted(good) > 0.9 * len(good) > 50

    driver.continuation = wrong_drafts
    bad = gone.verdicts(500)
    num_refused = len(bad) - num_accepted(bad)
    assert (
        20
        < num_refused
        < MAX_REFUSALS
        + NUM_SEQUENCES
        + counters.times_distrusted * (MAX_PROBE_REFUSALS + NUM_SEQUENCES)
    )

    driver.continuation = right_drafts
    gone.until(lambda: len(driver.verdicts) and num_accepted(driver.verdicts[-100:]) > 90, 4_000)
    assert gone.state is DrafterState.READY
    gone.check_answers()


def requests(tag, path=Path.SPECULATIVE):
    rng = random.Random(5)
    return [
        GenerationRequest(
            request_id=f"{tag}-{index}",
            request_key=index,
            prompt_ids=tuple(rng.choices(range(3, 128), k=12)),
            sampling=SamplingParams(temperature=float(index % 2)),
            max_tokens=100,
            ignore_eos=True,
            path=path,
        )
        for index in range(NUM_SEQUENCES)
    ]


async def test_over_the_wire_with_a_model(tmp_path):
    """The same tokens throughout; and the drafter is left alone, by the verifier's own word."""
    source = str(make_tiny_model(tmp_path))
    answers = {}

    def right(token_ids, depth):
        prompt, given = tuple(token_ids[:12]), len(token_ids) - 12
        return answers[prompt][given : given + depth]

    async with (
        running_verifier(source, dtype="float32", connect_backoff_s=0.05) as verifier,
        ScriptedDrafter(oracle(right)) as drafter,
    ):

        async def generate(tag):
            """Drafts verified, and accepted, of each."""
            made = await verifier.generate(requests(tag))
            assert [answer.token_ids for answer in made] == list(answers.values()), tag
            stats = [answer.stats for answer in made]
            return [(one.num_draft_tokens, one.num_accepted_tokens) for one in stats]

        plain = await verifier.generate(requests("plain"), path=Path.PLAIN)
        for request, answer in zip(requests("plain"), plain, strict=True):
            answers[request.prompt_ids] = answer.token_ids
        await verifier.use_drafters(drafter.member)
        assert all(accepted > 10 for _, accepted in await generate("good"))

        drafter.answer = oracle(lambda *committed: wrong(right(*committed), 128))
        counters = verifier.service._draft_client.counters

        async def is_distrusted():
            assert not any(accepted for _, accepted in await generate("bad"))
            return counters.times_distrusted

        await until(is_distrusted, 20.0)
        text = verifier.service.metrics.text()
        assert total(text, "paceline_fallbacks_total", reason="drafter_distrusted") > 0

        drafter.answer = oracle(right)

        async def is_back():
            return all(accepted > 10 for _, accepted in await generate("good again"))

        await until(is_back, 20.0)
