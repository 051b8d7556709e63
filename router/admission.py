"""How much this router takes at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.config import AdmissionConfig
from cluster.errors import InvalidRequestError, OverloadedError


class Admission:
    """A bounded number of generations in flight. What does not fit is refused at once, before
    anything is allocated for it; nothing waits here."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self.in_flight = 0
        """Generations that hold a slot; 0 <= in_flight <= max_concurrent_requests."""

    def reconfigure(self, config: AdmissionConfig) -> None:
        """Take another limit; what is in flight stays."""
        self._config = config

    @contextmanager
    def slots(self, count: int) -> Iterator[None]:
        """Hold `count` slots. Raises OverloadedError if they are not free now, and
        InvalidRequestError if they never will be."""
        self._take(count)
        try:
            yield
        finally:
            self.in_flight -= count

    def _take(self, count: int) -> None:
        most = self._config.max_concurrent_requests
        if count > most:
            raise InvalidRequestError(
                f"the request asks for {count} generations at once, over the limit of {most}",
                param="n",
            )
        if self.in_flight + count > most:
            raise OverloadedError(
                f"{self.in_flight} of {most} generations are in flight; try again shortly",
                code="overloaded",
                retry_after_s=self._config.retry_after_s,
            )
        self.in_flight += count
