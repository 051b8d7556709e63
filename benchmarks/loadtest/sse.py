"""Takes a stream of server-sent events apart, wherever the network has cut it."""

from __future__ import annotations

from collections.abc import Iterator

MAX_LINE_BYTES = 1 << 22


class EventReader:
    """Feed it bytes as they come; it gives the data of each event that is whole."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Data of the events that end within these bytes. Comments and other fields are skipped.

        Raises ValueError if a line is longer than MAX_LINE_BYTES.
        """
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line of over {MAX_LINE_BYTES} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()
