"""`paceline chat`: streams answers; on a terminal, what the drafter foresaw is tinted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

from cluster.commands.api_client import ApiClient, ApiError, Json
from cluster.commands.terminal import CYAN, DIM, has_colour, printable, styled

MAX_TOKENS = 1024
"""An answer is cut there: a small model may find no end."""


def run(client: ApiClient, prompt: str | None) -> bool:
    """Answer the prompt, or without one converse until the input ends. True if every answer came
    to its end. Raises ApiError if the prompt's did not, or if no model is served."""
    conversation = Conversation(client)
    if prompt is not None:
        conversation.ask(prompt)
        return True
    return _converse(conversation)


def _converse(conversation: Conversation) -> bool:
    all_answered = True
    for prompt in _prompts(conversation):
        try:
            conversation.ask(prompt)
        except ApiError as error:
            print(f"paceline: {error}", file=sys.stderr)
            all_answered = False
        except KeyboardInterrupt:
            continue
    return all_answered


def _prompts(conversation: Conversation) -> Iterator[str]:
    """Lines of the input that are not empty."""
    ask = ""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() editing and history
        print(f"{conversation.model} at {conversation.client.base_url}; Ctrl-D ends")
        ask = "> "
    while True:
        try:
            prompt = input(ask)
        except (EOFError, KeyboardInterrupt):
            return
        if prompt.strip():
            yield prompt


class Conversation:
    """The turns so far. A question whose answer failed leaves no turn behind."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client
        self.model = _model_name(client)
        self.messages: list[Json] = []

    def ask(self, prompt: str) -> None:
        """Print the answer as it comes."""
        question = {"role": "user", "content": prompt}
        body = {
            "model": self.model,
            "messages": [*self.messages, question],
            "stream": True,
            "speculation": {"mode": "auto", "trace": True},
        }
        answer = _Answer()
        try:
            for chunk in self.client.stream("/v1/chat/completions", body):
                answer.show(chunk)
                if answer.num_tokens >= MAX_TOKENS:
                    break  # Which ends the stream, and the generation with it.
        except (AttributeError, KeyError, TypeError):
            raise self.client.unexpected() from None
        finally:
            answer.end_line()
        answer.sum_up()
        self.messages += [question, {"role": "assistant", "content": answer.text}]


class _Answer:
    """One answer on its way to the terminal."""

    def __init__(self) -> None:
        self.text = ""
        self.num_tokens = 0
        self._speculation: Json | None = None
        self._on_terminal = sys.stdout.isatty()
        self._coloured = has_colour(sys.stdout)

    def show(self, chunk: Json) -> None:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            trace = choice.get("speculation") or {}
            self.text += text
            self.num_tokens += trace.get("num_tokens", 0)
            self._write(text, trace.get("accepted_spans", ()))
        self._speculation = chunk.get("speculation", self._speculation)

    def end_line(self) -> None:
        if self.text:
            print(flush=True)

    def sum_up(self) -> None:
        if self._on_terminal and self._speculation:
            line = summary(self._speculation, self.num_tokens)
            print(styled(line, DIM) if self._coloured else line)

    def _write(self, text: str, accepted_spans: Sequence[Sequence[int]]) -> None:
        for piece, foreseen in pieces(text, accepted_spans):
            shown = printable(piece) if self._on_terminal else piece
            tinted = foreseen and self._coloured
            print(styled(shown, CYAN) if tinted else shown, end="", flush=True)


def pieces(text: str, accepted_spans: Sequence[Sequence[int]]) -> list[tuple[str, bool]]:
    """A chunk's text in order, each piece with whether accepted drafts spell it.

    accepted_spans  # [[start, end), ...] in characters, as the trace gives them
    """
    cut: list[tuple[str, bool]] = []
    done = 0
    for start, end in accepted_spans:
        cut += [(text[done:start], False), (text[start:end], True)]
        done = end
    return [piece for piece in (*cut, (text[done:], False)) if piece[0]]


def summary(speculation: Json, num_tokens: int) -> str:
    """What speculation did for an answer, in one line."""
    steps = f"{num_tokens} tokens in {speculation['num_steps']} steps"
    if not speculation["num_draft_tokens"]:
        return f"[{speculation['path']}, no drafts; {steps}; {speculation['reason']}]"
    accepted = f"{speculation['num_accepted_tokens']} of {speculation['num_draft_tokens']}"
    return f"[{speculation['drafter']}: {accepted} drafts accepted; {steps}]"


def _model_name(client: ApiClient) -> str:
    models = client.get_json("/v1/models")
    try:
        return str(models["data"][0]["id"])
    except (IndexError, KeyError, TypeError):
        raise client.unexpected() from None
