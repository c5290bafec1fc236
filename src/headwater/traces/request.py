"""Requests of a trace, and the trace itself. Lengths and positions are in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.request import Boundaries, Fidelity, Span

TOKEN_BYTES = 4
BLOCK_BYTES = 8


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request as its provider counted them."""

    prompt_tokens: int
    cached_tokens: int | None = None  # of the prompt, read from the provider's cache; None: not reported
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `text` is the index's key: token ids of 4 bytes, or ids of blocks of 8 bytes.

    It holds the prompt, then the known part of the output. It may be shared with the session's other requests and be
    longer than this one: its first `known_tokens` are this request's prompt and output.
    """

    session: str  # requests of one session come one after the other
    text: bytes
    prompt_tokens: int
    output_tokens: int
    known_tokens: int  # at least prompt_tokens
    at: float | None = None  # seconds on the recording's clock; None: not recorded
    think: float | None = None  # seconds between the answer before and this request; None: not recorded
    boundaries: Boundaries = field(default_factory=Boundaries)
    namespace: str = ""
    segments: tuple[Span, ...] = ()  # of the prompt, ascending and disjoint, in traces of tokens
    fidelity: Fidelity = Fidelity.BALANCED  # where there are segments
    retry: bool = False  # sent again, apart from its session: it does not end the conversation
    ended: bool = False  # hint: its conversation ends with this request
    priority: int = 0  # hint, as of a Generation
    usage: Usage | None = None  # as reported in the recording


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the file's order, those of one session in the session's order."""

    name: str
    requests: Sequence[Request]
    block_tokens: int = 1  # tokens that one element of `text` stands for: 1, or a recorded block's length
    notes: tuple[str, ...] = ()  # what a reader had to infer or leave out, for the table's foot
    has_token_ids: bool = True  # False: a recording of pages, whose ids within a page are not those of its tokens
    seconds: float = 0.0  # that reading and tokenising took

    @property
    def element_bytes(self) -> int:
        """Bytes of a token id, or of a block's id."""
        return TOKEN_BYTES if self.block_tokens == 1 else BLOCK_BYTES

    @property
    def reported_hit_rate(self) -> float | None:
        """Share of prompt tokens that the provider read from its cache, over the requests that report it."""
        told = [one.usage for one in self.requests if one.usage is not None and one.usage.cached_tokens is not None]
        prompts = sum(usage.prompt_tokens for usage in told)
        return sum(usage.cached_tokens or 0 for usage in told) / prompts if prompts else None

    @property
    def has_segments(self) -> bool:
        """True if a request has segments."""
        return any(request.segments for request in self.requests)

    def ids(self, request: Request, span: Span) -> bytes:
        """Return the request's token ids in a span, four bytes each; for traces of tokens."""
        return request.text[span.start * TOKEN_BYTES : span.end * TOKEN_BYTES]

    def key(self, request: Request, tokens: int) -> bytes:
        """Return the key of the request's first `tokens`, at most the known ones: whole blocks only."""
        return request.text[: min(tokens, request.known_tokens) // self.block_tokens * self.element_bytes]
