"""Perplexity of a text under a model, from a server that scores prompts (`echo` with `logprobs`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import zstandard

from headwater.errors import ConfigError
from headwater.evaluate.items import Json
from headwater.evaluate.server import Server
from headwater.load.endpoint import ServerError
from headwater.traces.source import open_bytes

Distribution = dict[str, float]  # log probabilities of the most likely tokens, by name


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a text with the log probability of each token but the first."""

    logprobs: tuple[float, ...]
    tops: tuple[Distribution, ...]  # the most likely tokens at each of these positions
    first_bytes: int  # bytes of the first token's text


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Likelihood of a text: the tokens that were scored, the bytes of their text, the sum of −ln p in nats."""

    tokens: int
    bytes: int
    nats: float

    @property
    def per_token(self) -> float:
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """A measure that is comparable between tokenizers."""
        return self.nats / math.log(2) / self.bytes

    @classmethod
    def of(cls, text: str, windows: Sequence[Window]) -> Perplexity:
        scored = [logprob for window in windows for logprob in window.logprobs]
        return cls(len(scored), len(text.encode()) - windows[0].first_bytes, -math.fsum(scored))

    def as_json(self) -> Json:
        return {**asdict(self), "per_token": self.per_token, "bits_per_byte": self.bits_per_byte}


def read_utf8(path: Path) -> str:
    """Read a text file, plain, gzip or zstd. Raises ConfigError if it is not UTF-8 or cannot be unpacked."""
    try:
        with open_bytes(path) as file:
            return file.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error
    except (EOFError, zstandard.ZstdError) as error:
        raise ConfigError(f"{path} cannot be unpacked: {error}") from error


def check_equal(ours: Sequence[int], server: Server, theirs: Sequence[int], other: Server) -> None:
    """Raise ServerError if two servers tokenise a text differently: their log probabilities are not comparable."""
    if ours == theirs:
        return
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    raise ServerError(
        f"{server.url} has {len(ours):,} tokens for the text, {other.url} {len(theirs):,}; "
        f"the first {at:,} of them are equal, all must be"
    )


def cut(tokens: Sequence[int], window: int) -> list[Sequence[int]]:
    """Cut a text into parts of at most `window` tokens that overlap by one, so that all but the first are scored."""
    return [tokens[at : at + window] for at in range(0, len(tokens) - 1, window - 1)]


def scored(
    server: Server, parts: Sequence[Sequence[int]], k: int, at_once: int, on_window: Callable[[], None]
) -> list[Window]:
    """Score the parts in order, with the `k` most likely tokens at each position. Raises ServerError."""

    def one(part: Sequence[int]) -> Window:
        fields = {"prompt": list(part), "echo": True, "logprobs": k, "max_tokens": 1}  # some servers refuse 0
        window = window_of(server, server.complete(fields), len(part), k)
        on_window()
        return window

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, parts))


def window_of(server: Server, answer: Json, n: int, k: int) -> Window:
    """Read the scores of a completion's first `n` tokens, which are its prompt.

    Raises ServerError if they have none, or if `k` most likely tokens were requested and none came.
    """
    try:
        found = answer["choices"][0]["logprobs"]
        logprobs = tuple(float(one) for one in found["token_logprobs"][1:n])
        tops = tuple(dict(top or {}) for top in found["top_logprobs"][1:n])
        first = answer["choices"][0]["text"][: found["text_offset"][1]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerError(f"{server.url}: the answer has no log probabilities of its prompt") from error
    if not len(logprobs) == len(tops) == n - 1:
        raise ServerError(f"{server.url}: {len(logprobs):,} tokens of a prompt of {n:,} have log probabilities")
    if k and not all(tops):
        raise ServerError(f"{server.url}: the answer has 0 of {k} most likely tokens at one of its prompt's {n:,}")
    return Window(logprobs, tops, len(first.encode()))
