"""A small real HTTP server that answers as it is told, down to the bytes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
SPECULATION = {
    "path": "speculative",
    "reason": "auto: 0.0 running per verifier, below 12",
    "drafter": "ngram",
    "num_steps": 2,
    "num_draft_tokens": 4,
    "num_accepted_tokens": 3,
    "acceptance_per_position": [1.0, 0.5],
}

Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class ScriptedRouter:
    """`answers` maps a path to what is done for it; `asked` holds the bodies that came."""

    answers: dict[str, Answer]
    url: str = ""
    asked: list[Any] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[ScriptedRouter]:
        router = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                router.answers[self.path](self)

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                router.asked.append(json.loads(self.rfile.read(length)))
                router.answers[self.path](self)

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def says(body: object, status: int = 200, **headers: str) -> Answer:
    """A whole body: JSON, or a text as it is."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def fails(status: int, message: str, param: str | None = None, **headers: str) -> Answer:
    """An error body in OpenAI's shape."""
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return says({"error": error}, status, **headers)


def streams(*events: object, done: bool = True, cut: bool = False) -> Answer:
    """A chunked event stream. Without `done` it ends without [DONE]; `cut` breaks the connection
    in the middle of a chunk."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        for event in events:
            _send_chunk(handler, f"data: {json.dumps(event)}\n\n")
        if done:
            _send_chunk(handler, "data: [DONE]\n\n")
        if cut:
            handler.wfile.write(b'400\r\ndata: {"choices": [')
            handler.close_connection = True
        else:
            handler.wfile.write(b"0\r\n\r\n")

    return answer


def _send_chunk(handler: BaseHTTPRequestHandler, text: str) -> None:
    data = text.encode()
    handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    handler.wfile.flush()


Spans = Sequence[tuple[int, int]]


def chunk(text: str, num_tokens: int = 1, accepted_spans: Spans = (), **more: object) -> Any:
    """One step's chunk, as router/openai_format.py makes it with trace."""
    num_accepted_tokens = max(num_tokens - 1, 0) if accepted_spans else 0
    trace = {
        "num_tokens": num_tokens,
        "num_draft_tokens": num_accepted_tokens,
        "num_accepted_tokens": num_accepted_tokens,
        "refused_token_ids": [],
        "accepted_spans": [list(span) for span in accepted_spans],
    }
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "speculation": trace}
    return {"choices": [choice], **more}
