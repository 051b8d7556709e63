"""Laws of the trial: replicas draft where decoding is faster with them, and rest where not."""

from __future__ import annotations

import math
import random

import pytest

from verifier_service.drafter_trial import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MAX_TRIAL_STEPS,
    PATIENCE_STEPS,
    SETTLING_STEPS,
    TRIAL_STEPS,
    DrafterTrial,
    TriedStep,
)

NOISE = 0.1
"""Of a step's time."""


class Machine:
    """Steps whose time is followed as StepCost follows it: what they take is soon what is expected,
    but not during a trial."""

    def __init__(self, tax: float, with_them: float, without: float, *, drafts_alone: bool = True):
        self.tax, self.with_them, self.without = tax, with_them, without
        self.drafts_alone = drafts_alone
        self.engaged_share = 1.0
        self.load = 1
        self.trial = DrafterTrial()
        self.rng = random.Random(1)
        self.num_ended = 0
        self._expected = 0.0

    def run(self, num_steps: int) -> float:
        """Share of the steps in which replicas were asked."""
        num_engaged = 0
        for _ in range(num_steps):
            engages = self.trial.engages
            num_engaged += engages
            took = math.log(1.0 + self.tax) * (engages and self.engaged_share > 0)
            surprise = took + self.rng.gauss(0.0, NOISE) - self._expected
            if not self.trial.is_on:
                self._expected += 0.2 * surprise
            tokens = self.with_them if engages else self.without
            share = self.engaged_share if engages else 0.0
            step = TriedStep(tokens, 1.0, surprise, share, self.load, self.drafts_alone)
            self.num_ended += self.trial.stepped(step)
        return num_engaged / num_steps


@pytest.mark.parametrize(
    ("tax", "with_them", "without", "pays"),
    [
        (0.0, 1.5, 1.0, True),
        (0.0, 1.5, 1.4, True),
        (0.2, 1.1, 1.0, False),
        (0.2, 1.5, 1.0, True),
        (0.2, 1.5, 1.45, False),
        (0.3, 2.0, 1.2, True),
        (0.0, 1.3, 1.6, False),
    ],
)
def test_replicas_draft_where_they_pay(tax, with_them, without, pays):
    machine = Machine(tax, with_them, without)
    machine.run(2_000)
    share = machine.run(2_000)
    assert share > 0.97 if pays else share < 0.03
    assert machine.trial.tax == pytest.approx(tax, abs=0.08)


def test_a_trial_of_replicas_that_rest_costs_little_and_sees_that_they_pay_again():
    machine = Machine(0.2, 1.1, 1.0)
    machine.run(4_000)
    assert not machine.trial.engages
    machine.tax, machine.with_them = 0.0, 1.6
    machine.run(8 * LONGEST_PAUSE)
    assert machine.run(500) > 0.9
    machine.tax = 0.9
    machine.run(8 * LONGEST_PAUSE)
    assert machine.run(500) < 0.1


def test_a_machine_that_is_slow_for_other_reasons_is_no_tax():
    """Other work comes and goes between trials, twice as slow and back."""
    machine = Machine(0.0, 1.2, 1.0)
    for _ in range(40):
        machine._expected -= math.log(2.0)
        machine.run(100)
        machine._expected += math.log(2.0)
        machine.run(100)
    assert machine.num_ended > 4
    assert machine.trial.tax < 0.1
    assert machine.run(300) > 0.9


def test_a_verifier_that_drafts_nothing_itself_tries_nothing_that_is_clear():
    """Its speed without replicas is 1, and no tax makes up for half a token more."""
    machine = Machine(0.2, 1.8, 1.0, drafts_alone=False)
    assert machine.run(5_000) == 1.0
    assert machine.num_ended == 0
    machine.with_them = 1.1
    assert machine.run(5_000) < 0.2
    assert machine.num_ended


def test_another_load_is_tried_soon():
    machine = Machine(0.2, 1.1, 1.0)
    machine.run(4_000)
    assert not machine.trial.engages
    machine.tax = 0.0
    machine.run(300)
    assert not machine.trial.engages, "the next trial is far off"
    machine.load = 8
    machine.run(300)
    assert machine.trial.pays


def test_nothing_is_learnt_where_no_replica_is():
    machine = Machine(0.2, 1.0, 1.0)
    machine.engaged_share = 0.0
    assert machine.run(5_000) == 1.0
    assert machine.trial.speed(engaged=True) is None
    assert "nothing else was tried" in machine.trial.reason


def test_replicas_that_are_gone_are_wanted_again():
    """While they rested their pool was scaled to nothing: nobody knows whether they pay."""
    machine = Machine(0.5, 1.1, 1.0)
    machine.run(4_000)
    assert not machine.trial.engages
    machine.engaged_share = 0.0
    machine.run(LONGEST_PAUSE + MAX_TRIAL_STEPS)
    assert machine.run(500) == 1.0
    assert machine.trial.pays, "it is no trial"


def test_replicas_that_never_get_ready_for_most_are_judged_as_they_are():
    machine = Machine(0.3, 1.0, 1.0)
    machine.engaged_share = 0.1
    machine.run(4_000)
    assert machine.run(500) < 0.1


def test_the_first_steps_after_a_turn_do_not_count():
    trial = DrafterTrial()
    typical = TriedStep(1.2, 1.0, 0.0, 1.0)
    for _ in range(SETTLING_STEPS + FIRST_PAUSE - 1):
        trial.stepped(typical)
    assert trial.engages
    trial.stepped(typical)
    assert not trial.engages
    resting = TriedStep(1.0, 1.0, -9.0, 0.0)
    for _ in range(SETTLING_STEPS):
        assert not trial.stepped(resting)
    calm = TriedStep(1.0, 1.0, 0.0, 0.0)
    ended = [trial.stepped(calm) for _ in range(TRIAL_STEPS)]
    assert ended == [False] * (TRIAL_STEPS - 1) + [True]
    assert trial.tax == 0.0
    assert trial.engages
    assert "rest" not in trial.reason
    assert PATIENCE_STEPS < MAX_TRIAL_STEPS
