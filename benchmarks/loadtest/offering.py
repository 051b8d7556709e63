"""Offers a cell's load: users of a closed one, the timetable of an open one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.loadtest.arrivals import Arrival
from benchmarks.loadtest.cell import ClosedOffer, OpenOffer, Phase
from benchmarks.loadtest.client import Clock
from benchmarks.loadtest.record import Outcome, RequestRecord

LONGEST_PAUSE_S = 5.0
PAUSE_S = 0.5
"""After an answer without a Retry-After that is not a success."""

Sending = Callable[[int, Arrival | None, float], Awaitable[RequestRecord]]
"""Sends the request of this number, with these lengths, due at this second of the cell."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a load that one worker offers: every `count`-th user, arrival and request."""

    index: int
    count: int


WHOLE = Shard(0, 1)


async def offer_open(offer: OpenOffer, shard: Shard, clock: Clock, sending: Sending) -> None:
    """Send every arrival at its time, however many are under way; wait for all ends."""
    async with asyncio.TaskGroup() as group:
        for number in range(shard.index, len(offer.arrivals), shard.count):
            arrival = offer.arrivals[number]
            await _until(clock, arrival.offset_s)
            group.create_task(_sent(sending, number, arrival))


async def _sent(sending: Sending, number: int, arrival: Arrival) -> None:
    await sending(number, arrival, arrival.offset_s)


async def offer_closed(offer: ClosedOffer, shard: Shard, clock: Clock, sending: Sending) -> None:
    """Let the shard's users ask until the offer ends; wait for their last answers."""
    numbers = Numbers(shard, offer.num_requests)
    most = max(phase.users for phase in offer.phases)
    await _until(clock, 0.0)
    async with asyncio.TaskGroup() as group:
        for user in range(shard.index, most, shard.count):
            group.create_task(_user(user, offer.phases, numbers, clock, sending))


class Numbers:
    """Deals out a shard's requests."""

    def __init__(self, shard: Shard, num_requests: int | None) -> None:
        self._next = shard.index
        self._step = shard.count
        self._end = num_requests

    def take(self) -> int | None:
        """The next number; None if there is none left."""
        if self._end is not None and self._next >= self._end:
            return None
        number = self._next
        self._next += self._step
        return number


async def _user(
    user: int, phases: tuple[Phase, ...], numbers: Numbers, clock: Clock, sending: Sending
) -> None:
    for phase in phases:
        if user < phase.users:
            await _ask_until(phase.until_s, numbers, clock, sending)
        else:
            await _until(clock, phase.until_s)


async def _ask_until(until_s: float, numbers: Numbers, clock: Clock, sending: Sending) -> None:
    while (now_s := clock.now_s()) < until_s:
        number = numbers.take()
        if number is None:
            return
        record = await sending(number, None, now_s)
        if record.outcome is not Outcome.OK:
            await _until(clock, min(until_s, clock.now_s() + _pause_s(record)))


def _pause_s(record: RequestRecord) -> float:
    """A user who was turned away comes back when told to, within limits."""
    asked = PAUSE_S if record.retry_after_s is None else record.retry_after_s
    return min(LONGEST_PAUSE_S, max(0.0, asked))


async def _until(clock: Clock, moment_s: float) -> None:
    if (left_s := moment_s - clock.now_s()) > 0:
        await asyncio.sleep(left_s)
