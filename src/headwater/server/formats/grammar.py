"""Grammars in llguidance's dialect of Lark, put together from rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# White space between a JSON's parts, as much as pretty printing needs: without a bound a weak model never stops.
FLEXIBLE = {"whitespace_pattern": r"[ \n\t]{0,40}"}
# as chat templates write values, so that the next turn's prompt repeats what was generated
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar:
    """Collects rules. Expressions are pieces of rule bodies: a rule's name, a literal, `%json` with a schema."""

    def __init__(self) -> None:
        self._rules: list[str] = []

    def rule(self, body: str, lazy: bool = False) -> str:
        """Add a rule; gives its name. A lazy one has a regular expression, and ends as soon as that can."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def until(self, end: str) -> str:
        """Any text up to the first `end`, and that."""
        return self.rule(f"/(.|\\n)*{quoted(end)}/", lazy=True)

    def json(self, schema: Mapping[str, Any], spaced: bool = False) -> str:
        """A JSON text that fits the schema."""
        return f"%json {json.dumps({**schema, 'x-guidance': SPACED if spaced else FLEXIBLE})}"

    def source(self, start: str) -> str:
        """The grammar whose texts are those of `start`."""
        return "\n".join([f"start: {start}", *self._rules])


def literal(text: str) -> str:
    return json.dumps(text)


def quoted(text: str) -> str:
    """The regular expression, between slashes, that matches the text alone."""
    return "".join(c if c.isalnum() or c == "_" else f"\\x{{{ord(c):x}}}" for c in text)


def either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"
