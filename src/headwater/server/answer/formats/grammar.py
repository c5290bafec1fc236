"""Grammars in llguidance's dialect of Lark, put together from rules.

To llguidance a token such as <think> is no text, whether the tokenizer calls it special or not: texts and regular
expressions never match it. A grammar has to name it, so it has to know which tags are tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

# White space between a JSON's parts, as much as pretty printing needs: without a bound a weak model never stops.
FLEXIBLE = {"whitespace_pattern": r"[ \n\t]{0,40}"}
# as chat templates write values, so that the next turn's prompt repeats what was generated
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar:
    """Collects rules. Expressions are pieces of rule bodies: a rule's name, a literal, `%json` with a schema."""

    def __init__(self, tag_tokens: Mapping[str, int]) -> None:
        """`tag_tokens`: ids of the tags that are tokens."""
        self._tokens = tag_tokens
        self._rules: list[str] = []

    def rule(self, body: str, lazy: bool = False) -> str:
        """Add a rule; gives its name. A lazy one has a regular expression, and ends as soon as that can."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def tag(self, text: str) -> str:
        """A tag, as the token that it is, or spelled out."""
        return f"<[{self._tokens[text]}]>" if text in self._tokens else literal(text)

    def text(self) -> str:
        """Any text without tags that are tokens."""
        return self.rule("/(.|\\n)*/")

    def until(self, end: str) -> str:
        """Any text up to the first `end`, and that."""
        if end in self._tokens:
            return f"{self.text()} {self.tag(end)}"
        return self.rule(f"/(.|\\n)*{quoted(end)}/", lazy=True)

    def json(self, schema: Mapping[str, Any], spaced: bool = False) -> str:
        """A JSON text that fits the schema."""
        return f"%json {json.dumps({**schema, 'x-guidance': SPACED if spaced else FLEXIBLE})}"

    def source(self, start: str) -> str:
        """The grammar whose texts are those of `start`."""
        return "\n".join([f"start: {start}", *self._rules])


def tag_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the tokens that llguidance takes for no text."""
    added = tokenizer.get_added_tokens_decoder()
    return {t.content: i for i, t in added.items() if t.special or (t.content[:1] == "<" and t.content[-1:] == ">")}


def literal(text: str) -> str:
    return json.dumps(text)


def quoted(text: str) -> str:
    """The regular expression, between slashes, that matches the text alone."""
    return "".join(c if c.isalnum() or c == "_" else f"\\x{{{ord(c):x}}}" for c in text)


def either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"
