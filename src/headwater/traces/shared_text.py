"""Shared text of a conversation's requests, while each prompt extends the prompt and answer before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from headwater.request import Boundaries, Fidelity, Span
from headwater.traces.request import TOKEN_BYTES, Request


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, as the index's key, and what else the log has of it."""

    text: bytes
    boundaries: Boundaries = field(default_factory=Boundaries)
    namespace: str = ""
    beginning: bytes | None = None  # identifies the conversation if the log has no sessions
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
    tokens: tuple[int, int, int]  # of the prompt, of the output, and of the known part of both
    at: float | None


class SharedTexts:
    """Requests of token ids whose sessions may be interleaved. A long session's text is kept only once."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []
        self._texts: dict[str | bytes, _Text] = {}  # by conversation: the text of its last request

    def add(self, session: str, prompt: Prompt, output: bytes, at: float | None = None, output_tokens: int = 0) -> None:
        """Add a request. output_tokens: the number of generated tokens if `output` does not have all of them."""
        conversation = session if prompt.beginning is None else prompt.beginning
        text = self._texts.get(conversation)
        if text is None or not prompt.text.startswith(text.longest):
            text = self._texts[conversation] = _Text(b"")
        text.longest = prompt.text + output
        n_prompt, n_output = len(prompt.text) // TOKEN_BYTES, len(output) // TOKEN_BYTES
        tokens = n_prompt, max(n_output, output_tokens), n_prompt + n_output
        # the prompt's own text is not kept: it is a prefix of the longest one
        held = replace(prompt, text=b"", beginning=None)
        self._asked.append(_Asked(session, text, held, tokens, at))

    def requests(self) -> Iterator[Request]:
        """Yield the requests in the order of `add`; called when all have been added."""
        for one in self._asked:
            prompt = one.prompt
            parts = prompt.boundaries, prompt.namespace, prompt.segments, prompt.fidelity
            asked = *one.tokens, one.at, None
            yield Request(one.session, one.text.longest, *asked, *parts)
