"""How much this router takes at once, and what it tells those it refuses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.config import AdmissionConfig
from cluster.errors import InvalidRequestError, OverloadedError, TenantOverloadedError
from router.api_keys import ANYONE, Tenant
from router.queue_outlook import QueueOutlook

LONGEST_RETRY_AFTER_S = 60.0
_UNKNOWN = QueueOutlook()


class Admission:
    """A bounded number of generations in flight, in all and for each tenant, and none that would
    wait in vain at the verifiers. What does not fit is refused at once, before anything is
    allocated for it; nothing waits here."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self.in_flight = 0
        """Generations that hold a slot; 0 <= in_flight <= max_concurrent_requests."""
        self._of_tenant: Counter[str] = Counter()
        """The same for tenants that hold any; they add up to in_flight."""

    def reconfigure(self, config: AdmissionConfig) -> None:
        """Take another limit; what is in flight stays."""
        self._config = config

    @contextmanager
    def slots(
        self,
        count: int,
        tenant: Tenant = ANYONE,
        outlook: QueueOutlook = _UNKNOWN,
        left_s: float = math.inf,
    ) -> Iterator[None]:
        """Hold `count` slots. `outlook`: of the best verifier; `left_s`: until the request's
        deadline. Raises TenantOverloadedError or OverloadedError if it cannot be taken now, and
        InvalidRequestError if it never will be."""
        self._check_tenant(count, tenant, outlook)
        self._check_total(count, outlook)
        self._check_queue(count, outlook, left_s)
        self.in_flight += count
        self._of_tenant[tenant.name] += count
        try:
            yield
        finally:
            self.in_flight -= count
            self._of_tenant[tenant.name] -= count
            if not self._of_tenant[tenant.name]:
                del self._of_tenant[tenant.name]

    def _check_tenant(self, count: int, tenant: Tenant, outlook: QueueOutlook) -> None:
        most = tenant.max_concurrent_requests
        if most is None:
            return
        if count > most:
            raise _too_many_at_once(count, most)
        if self._of_tenant[tenant.name] + count > most:
            raise TenantOverloadedError(
                f"{self._of_tenant[tenant.name]} of {tenant.name}'s {most} generations are in "
                "flight; try again shortly",
                code="rate_limit_exceeded",
                retry_after_s=self._retry_after_s(outlook),
            )

    def _check_total(self, count: int, outlook: QueueOutlook) -> None:
        most = self._config.max_concurrent_requests
        if count > most:
            raise _too_many_at_once(count, most)
        if self.in_flight + count > most:
            raise OverloadedError(
                f"{self.in_flight} of {most} generations are in flight; try again shortly",
                code="overloaded",
                retry_after_s=self._retry_after_s(outlook),
            )

    def _check_queue(self, count: int, outlook: QueueOutlook, left_s: float) -> None:
        """An idle verifier takes any request, however long the last ones took."""
        if outlook.room is not None and outlook.room < count and outlook.wait_s > 0:
            raise OverloadedError(
                f"the queue is full; a place in it is free in about {outlook.wait_s:.1f} s",
                code="queue_full",
                retry_after_s=self._retry_after_s(outlook),
            )
        if outlook.wait_s > 0 and outlook.wait_s + outlook.answer_s > left_s:
            raise OverloadedError(
                f"the answer would come in about {outlook.wait_s + outlook.answer_s:.1f} s, of "
                f"which {outlook.wait_s:.1f} s in the queue: over the {left_s:.1f} s until the "
                "request's deadline",
                code="queue_too_long",
                retry_after_s=self._retry_after_s(outlook),
            )

    def _retry_after_s(self, outlook: QueueOutlook) -> float:
        return retry_after_s(outlook.wait_s, self._config.retry_after_s)


def retry_after_s(wait_s: float, at_least_s: float) -> float:
    """What a refused client is told to wait: until what waits now has its place, so that it finds
    the queue short then."""
    return max(at_least_s, min(math.ceil(wait_s), LONGEST_RETRY_AFTER_S))


def _too_many_at_once(count: int, most: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"the request asks for {count} generations at once, over the limit of {most}", param="n"
    )
