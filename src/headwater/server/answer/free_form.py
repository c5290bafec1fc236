"""Text of a free-form tool's call, decoded from the JSON of the function that stands for the tool."""

from __future__ import annotations

import json
import re
from typing import Any

from headwater.server.requests.client_tools import INPUT

HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
HEX = "[0-9a-fA-F]"
UNIT, HIGH, LOW = f"{HEX}{{4}}", f"[dD][89abAB]{HEX}{{2}}", f"[dD][c-fC-F]{HEX}{{2}}"  # UTF-16, and halves of a pair
NO_UNIT = f"u{HEX}{{0,3}}(?!{HEX})."  # after a backslash that is a character
# Characters and whole escapes of a JSON string, up to its end or to an escape that more text may complete.
CHARACTERS = re.compile(
    "|".join((
        r'(?:[^"\\]',
        r"\\[^u]",
        rf"\\u{HIGH}\\u{LOW}",
        rf"\\u{HIGH}(?=[^\\]|\\[^u]|\\u(?!{LOW}){UNIT}|\\{NO_UNIT})",
        rf"\\u(?!{HIGH}){UNIT}",
        rf"\\(?={NO_UNIT}))*",
    )),
    re.DOTALL,
)  # fmt: skip
ESCAPE = re.compile(rf"\\(?:u({UNIT})|(.))", re.DOTALL)
ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


class FreeFormText:
    """Decoder of a call's arguments, in pieces. The text does not depend on how they are cut.

    Arguments of another form than the function's become text at their end: the one text among them, or their JSON.
    """

    def __init__(self) -> None:
        self._unread = ""
        self._begun = self._ended = False

    def push(self, arguments: str) -> str:
        """Return the text that the next piece adds."""
        if self._ended:
            return ""
        self._unread += arguments
        if not self._begun:
            if (head := HEAD.match(self._unread)) is None:
                return ""
            self._begun, self._unread = True, self._unread[head.end() :]
        found = CHARACTERS.match(self._unread)
        assert found is not None  # of no characters, too
        self._unread = self._unread[found.end() :]
        self._ended = self._unread.startswith('"')
        return unescaped(found[0])

    def finish(self) -> str:
        """Return the rest of the text, when the arguments have ended. An escape that was cut off is dropped."""
        return "" if self._begun else other_text(self._unread)


def unescaped(text: str) -> str:
    """Decode the inside of a JSON string. An unknown escape stays, half of a surrogate pair becomes U+FFFD."""
    decoded = ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else ESCAPED.get(found[2], found[0]), text)
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def other_text(arguments: str) -> str:
    """Return the text that arguments of another form hold."""
    try:
        value: Any = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(value, dict):
        return arguments
    texts = [value[INPUT]] if INPUT in value else list(value.values())
    if not texts:
        return ""
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else arguments
