"""`paceline chat`: streams answers; on a terminal, what the drafter foresaw is tinted."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator

from cluster.commands.api_client import ApiClient, ApiError, Json
from cluster.commands.terminal import CYAN, DIM, has_colour, printable, styled

_WORD = re.compile(r"\s*\S+")


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
        self._num_tokens = 0
        self._speculation: Json | None = None
        self._on_terminal = sys.stdout.isatty()
        self._coloured = has_colour(sys.stdout)

    def show(self, chunk: Json) -> None:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            trace = choice.get("speculation") or {}
            num_tokens = trace.get("num_tokens", 0)
            self.text += text
            self._num_tokens += num_tokens
            self._write(text, num_tokens, trace.get("num_accepted_tokens", 0))
        self._speculation = chunk.get("speculation", self._speculation)

    def end_line(self) -> None:
        if self.text:
            print(flush=True)

    def sum_up(self) -> None:
        if self._on_terminal and self._speculation:
            line = summary(self._speculation, self._num_tokens)
            print(styled(line, DIM) if self._coloured else line)

    def _write(self, text: str, num_tokens: int, num_accepted_tokens: int) -> None:
        if self._on_terminal:
            text = printable(text)
        if self._coloured:
            foreseen, own = split_accepted(text, num_tokens, num_accepted_tokens)
            text = styled(foreseen, CYAN) + own
        print(text, end="", flush=True)


def split_accepted(text: str, num_tokens: int, num_accepted_tokens: int) -> tuple[str, str]:
    """(what the drafter foresaw, what the target added after it) of a chunk's text.

    A trace counts tokens and does not say where their text ends, so the text is cut in proportion,
    at the nearest word.
    """
    if num_accepted_tokens == 0 or num_accepted_tokens >= num_tokens:
        return (text, "") if num_accepted_tokens else ("", text)
    cut = round(len(text) * num_accepted_tokens / num_tokens)
    ends = [word.end() for word in _WORD.finditer(text)][:-1]
    cut = min(ends, key=lambda end: abs(end - cut), default=cut)
    return text[:cut], text[cut:]


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
