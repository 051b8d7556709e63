"""Whether drafter replicas shall draft for this verifier: found out by trial.

What the drafts of replicas bring is seen in the plan of each step, and so are the rows and waits
that they cost. Two things are not. A drafter that shares memory, cores or a network card with the
verifier slows each of its steps, whether its drafts are verified or not: the *tax*. And where the
verifier drafts itself, much of what a replica brings would be there without it. So now and then the
other way is tried for some steps, and what a step gives is compared.

Other work on the machine comes and goes too. So the tax is taken from the steps of a trial alone,
against what steps took just before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

SETTLING_STEPS = 4
"""After a change, until drafters are at rest, or at work again."""
TRIAL_STEPS = 8
"""That a trial compares."""
_READY_SHARE = 0.9
"""Of the sequences, for which a replica drafts once drafters are at work."""
PATIENCE_STEPS = 48
"""Until drafters are taken to be at work as far as they ever will be: many prompts may have to be
read first."""
MAX_TRIAL_STEPS = 96
"""A trial ends by then, whatever came of it: drafters may take long to read, or be lost."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024
"""Steps between two trials: twice as many after each that changed nothing, a quarter of them where
the load is another than it was at the last one."""
_OTHER_LOAD = 2.0
"""Factor."""
_LOAD_WEIGHT = 0.05
_WINDOW, _KEPT_STEPS = 64, 16
"""Effective number of steps that are remembered of the way that is gone, and of the other one as it
is tried anew; under another load nothing is."""
_TAX_WEIGHT = 0.3
_MOST_TAX = 0.5


@dataclass(slots=True)
class _Way:
    """Steps with replicas at work, or without, of late."""

    tokens: float = 0.0
    length: float = 0.0
    """Means; both as in TriedStep."""
    num_steps: int = 0

    def observe(self, tokens: float, length: float) -> None:
        self.num_steps += 1
        weight = 1.0 / min(self.num_steps, _WINDOW)
        self.tokens += weight * (tokens - self.tokens)
        self.length += weight * (length - self.length)

    @property
    def speed(self) -> float:
        """Over that without drafts."""
        return self.tokens / self.length


@dataclass(frozen=True, slots=True)
class TriedStep:
    """A step with sequences for which replicas might draft."""

    tokens: float
    """That a sequence was expected to gain, its own draw included."""
    length: float
    """Planned, over that of a step without drafts."""
    surprise: float
    """Log of the time that it took over what was expected."""
    engaged_share: float
    """Of these sequences, those for which a replica drafts."""
    num_sequences: int = 1
    """All that drew a token."""
    drafts_alone: bool = True
    """The verifier drafts itself for some of them. Where it does not, its speed without replicas is
    known."""
    is_typical: bool = True
    """Its time tells something of others."""


class DrafterTrial:
    """Of one engine. Knows no clock and counts steps."""

    def __init__(self) -> None:
        self.engages = True
        """Replicas shall draft in the next steps."""
        self._verdict = True
        """The way between two trials."""
        self._ways = {True: _Way(), False: _Way()}
        self._log_tax: float | None = None
        self._pause = FIRST_PAUSE
        self._load = self._load_judged = 1.0
        """Sequences of a step on the average, now and at the last trial."""
        self._num_steps = 0
        """Since the last turn, of those that tell something."""
        self._num_tried = 0
        """The same, of all steps in which there was something to draft for."""
        self._surprises: list[float] = []

    @property
    def is_on(self) -> bool:
        """The other way is tried: what a step takes says nothing of steps to come."""
        return self.engages is not self._verdict

    @property
    def pays(self) -> bool:
        """Replicas are held to be worth what they cost."""
        return self._verdict

    @property
    def tax(self) -> float:
        """By how much replicas at work lengthen a step, as a share of it, beyond what they bring to
        verify."""
        return max(0.0, math.exp(self._log_tax) - 1.0) if self._log_tax is not None else 0.0

    def speed(self, *, engaged: bool) -> float | None:
        """Of decoding with replicas at work or without, over that without any drafts; None if it
        was not seen."""
        way = self._ways[engaged]
        if not way.num_steps:
            return None
        return way.speed / (1.0 + self.tax) if engaged else way.speed

    @property
    def reason(self) -> str:
        """Why replicas draft, or rest, for a person."""
        with_them, without = self.speed(engaged=True), self.speed(engaged=False)
        if with_them is None or without is None:
            return "drafter replicas draft: nothing else was tried yet"
        does = "draft" if self._verdict else "rest"
        return (
            f"drafter replicas {does}: with them decoding goes {with_them:.2f} times as fast as "
            f"without any drafts, without them {without:.2f} times; their being at work lengthens "
            f"a step by {self.tax:.0%}"
        )

    def stepped(self, step: TriedStep) -> bool:
        """A step was run, with sequences for which replicas might draft. True if a trial ended and
        has told something."""
        self._num_tried += 1
        self._load += _LOAD_WEIGHT * (step.num_sequences - self._load)
        if step.is_typical and self._is_settled(step.engaged_share):
            self._num_steps += 1
            self._ways[self.engages].observe(step.tokens, step.length)
            if self.is_on:
                self._surprises.append(step.surprise)
        if not self.is_on:
            pause = self._pause
            if self._is_other_load():
                pause = max(FIRST_PAUSE, pause // 4)
            if self._num_steps >= pause:
                self._begin(step.drafts_alone)
            return False
        if len(self._surprises) >= TRIAL_STEPS:
            self._judge()
            return True
        if self._num_tried >= MAX_TRIAL_STEPS:
            self._verdict = True  # No replica came: whether they pay is not known any more.
            self._turn(True)
        return False

    def _is_settled(self, engaged_share: float) -> bool:
        if self._num_tried <= SETTLING_STEPS:
            return False
        least = _READY_SHARE if self._num_tried <= PATIENCE_STEPS else 0.0
        return not self.engages or engaged_share > least

    def _is_other_load(self) -> bool:
        return not 1 / _OTHER_LOAD < self._load / self._load_judged < _OTHER_LOAD

    def _begin(self, drafts_alone: bool) -> None:
        """A trial, unless no tax would make it worth while."""
        is_clear = not drafts_alone and self._ways[True].speed > 1.0 + _MOST_TAX
        if self.engages and is_clear:
            self._turn(True)
            return
        tried = self._ways[not self.engages]
        tried.num_steps = 0 if self._is_other_load() else min(tried.num_steps, _KEPT_STEPS)
        self._turn(not self.engages)

    def _judge(self) -> None:
        surprise = median(self._surprises)
        log_tax = surprise if self.engages else -surprise
        before = log_tax if self._log_tax is None else self._log_tax
        self._log_tax = before + _TAX_WEIGHT * (log_tax - before)
        with_them, without = self.speed(engaged=True), self.speed(engaged=False)
        pays = with_them is None or without is None or with_them > without
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if pays is self._verdict else FIRST_PAUSE
        self._verdict = pays
        self._turn(pays)

    def _turn(self, engages: bool) -> None:
        self.engages = engages
        self._load_judged = self._load
        self._num_steps = self._num_tried = 0
        self._surprises.clear()
