"""Times every generation request, whatever becomes of it."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.generation_client import Clock
from router.metrics import RequestMetrics, RequestRecord

RECORDED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


class RequestRecorder:
    """ASGI middleware. Leaves a RequestRecord as `record` in the request's state, and ends it."""

    def __init__(self, app: ASGIApp, *, metrics: RequestMetrics, clock: Clock) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_recorded(scope):
            await self._app(scope, receive, send)
            return
        record = RequestRecord(self._metrics, self._clock)
        scope.setdefault("state", {})["record"] = record

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.answered(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_recorded)
        except Exception:
            record.answered(500)
            raise
        finally:
            record.ended()


def _is_recorded(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"] in RECORDED_PATHS
