"""One text for all requests of a session, as long as each begins with what the one before knew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headwater.traces.request import TOKEN_BYTES, Request
from headwater.types import Boundaries


@dataclass(slots=True)
class _Text:
    longest: bytes


@dataclass(frozen=True, slots=True)
class _Asked:
    session: str
    text: _Text
    prompt_tokens: int
    output_tokens: int
    known_tokens: int
    at: float | None
    boundaries: Boundaries


class SharedTexts:
    """Requests of token ids whose sessions may be interleaved. A long session is held once, not once a request."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []
        self._texts: dict[str, _Text] = {}  # of each session, the one that its last request has

    def add(
        self,
        session: str,
        prompt: bytes,
        output: bytes,
        at: float | None = None,
        boundaries: Boundaries | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """`output_tokens` where the output's tokens are not known, but their number is."""
        text = self._texts.get(session)
        if text is None or not prompt.startswith(text.longest):
            text = self._texts[session] = _Text(b"")
        text.longest = prompt + output
        n_prompt, n_output = len(prompt) // TOKEN_BYTES, len(output) // TOKEN_BYTES
        wanted = n_output if output_tokens is None else max(n_output, output_tokens)
        known = boundaries or Boundaries()
        self._asked.append(_Asked(session, text, n_prompt, wanted, n_prompt + n_output, at, known))

    def requests(self) -> Iterator[Request]:
        """In the order in which they were added. Call it when all are."""
        for one in self._asked:
            known = one.prompt_tokens, one.output_tokens, one.known_tokens
            yield Request(one.session, one.text.longest, *known, one.at, boundaries=one.boundaries)
