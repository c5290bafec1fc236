"""Server-sent events out of bytes that were cut anywhere (WHATWG HTML, section 9.2)."""

from __future__ import annotations


class EventParser:
    """Feed it what came; it gives the data of each event that is complete. Other fields and comments are dropped."""

    def __init__(self) -> None:
        self._rest = b""  # of a line that is not complete
        self._data: list[bytes] = []  # lines of an event that is not complete
        self._after_return = False  # the last line ended with CR: an LF that follows belongs to it

    def feed(self, chunk: bytes) -> list[bytes]:
        if self._after_return and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_return = False
        if b"\r" in chunk:
            self._after_return = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
