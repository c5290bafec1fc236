"""Finds where a JSON object ends that comes in pieces."""

from __future__ import annotations

import re

OUTSIDE = re.compile(r'["{}\[\]<]')  # what matters in JSON outside of a string; "<" is never there
INSIDE = re.compile(r'["\\]')  # and inside of one


class JsonEnd:
    """Finds where an object ends that comes in pieces: after its last brace, or before a "<" outside of strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def push(self, text: str) -> int | None:
        """Where in this piece the object ends; None if it goes on."""
        at = 0
        if self._escaped and text:
            self._escaped, at = False, 1
        while found := (INSIDE if self._quoted else OUTSIDE).search(text, at):
            at = found.end()
            match found[0]:
                case '"':
                    self._quoted = not self._quoted
                case "\\":
                    self._escaped = at == len(text)
                    at += 1
                case "<":
                    return found.start()
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
        return None
