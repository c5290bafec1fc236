"""One text for all requests of a conversation, as long as each begins with what the one before knew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from headwater.request import Boundaries, Fidelity, Span
from headwater.traces.request import TOKEN_BYTES, Request


@dataclass(frozen=True, slots=True)
class Prompt:
    text: bytes
    boundaries: Boundaries = field(default_factory=Boundaries)
    namespace: str = ""
    beginning: bytes | None = None  # what tells a conversation from others, where sessions are not known
    segments: tuple[Span, ...] = ()
    fidelity: Fidelity = Fidelity.BALANCED


@dataclass(slots=True)
class _Text:
    longest: bytes


@dataclass(frozen=True, slots=True)
class _Asked:
    session: str
    text: _Text
    prompt: Prompt
    tokens: tuple[int, int, int]  # of the prompt, of the output, and how many of both are known
    at: float | None


class SharedTexts:
    """Requests of token ids whose sessions may be interleaved. A long session is held once, not once a request."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []
        self._texts: dict[str | bytes, _Text] = {}  # of each conversation, the one that its last request has

    def add(self, session: str, prompt: Prompt, output: bytes, at: float | None = None, output_tokens: int = 0) -> None:
        """`output_tokens` where the number of generated tokens is known, and they are not, or not all."""
        conversation = session if prompt.beginning is None else prompt.beginning
        text = self._texts.get(conversation)
        if text is None or not prompt.text.startswith(text.longest):
            text = self._texts[conversation] = _Text(b"")
        text.longest = prompt.text + output
        n_prompt, n_output = len(prompt.text) // TOKEN_BYTES, len(output) // TOKEN_BYTES
        tokens = n_prompt, max(n_output, output_tokens), n_prompt + n_output
        # the prompt's own text is not held: that of the longest one stands for it
        held = replace(prompt, text=b"", beginning=None)
        self._asked.append(_Asked(session, text, held, tokens, at))

    def requests(self) -> Iterator[Request]:
        """In the order in which they were added. Call it when all are."""
        for one in self._asked:
            prompt = one.prompt
            parts = prompt.boundaries, prompt.namespace, prompt.segments, prompt.fidelity
            asked = *one.tokens, one.at, None
            yield Request(one.session, one.text.longest, *asked, *parts)
