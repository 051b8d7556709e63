"""Token ids to text as they come, never splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


class Detokenizer:
    """Decodes one generation. Each id costs the length of its own bytes, whatever came before.

    A character whose bytes are spread over several tokens appears with the last of them. Bytes
    that are no UTF-8 appear as U+FFFD, as in a decoding of the whole.
    """

    def __init__(self, text_bytes: Sequence[bytes]) -> None:
        self._text_bytes = text_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete; an id outside the vocabulary has none."""
        table = self._text_bytes
        return self._utf8.decode(b"".join(table[i] for i in token_ids if 0 <= i < len(table)))

    def finish(self) -> str:
        """What an unfinished character at the end leaves: U+FFFD or nothing."""
        return self._utf8.decode(b"", final=True)
