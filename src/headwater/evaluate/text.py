"""How likely a text is to a model: perplexity, from a server that scores prompts (`echo` with `logprobs`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import zstandard

from headwater.errors import ConfigError
from headwater.evaluate.answered import Json
from headwater.evaluate.server import Server, ServerFault
from headwater.traces.source import open_bytes

Distribution = dict[str, float]  # log probabilities of the most likely tokens, by name


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a text, scored: of each of its tokens but the first."""

    logprobs: tuple[float, ...]
    tops: tuple[Distribution, ...]  # as many as there are logprobs
    first_bytes: int  # of its first token's text


@dataclass(frozen=True, slots=True)
class Perplexity:
    tokens: int  # that were scored
    bytes: int  # of their text
    nats: float  # their negative log probabilities together

    @property
    def per_token(self) -> float:
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Comparable where tokenizers differ."""
        return self.nats / math.log(2) / self.bytes

    @classmethod
    def of(cls, text: str, windows: Sequence[Window]) -> Perplexity:
        scored = [logprob for window in windows for logprob in window.logprobs]
        return cls(len(scored), len(text.encode()) - windows[0].first_bytes, -math.fsum(scored))


def read_utf8(path: Path) -> str:
    """A file of text, plain, gzip or zstd. Raises ConfigError for one that is no text, or cannot be unpacked."""
    try:
        with open_bytes(path) as file:
            return file.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8: {error}") from error
    except (EOFError, zstandard.ZstdError) as error:
        raise ConfigError(f"{path} cannot be unpacked: {error}") from error


def tokens_of(server: Server, text: str) -> list[int]:
    """As the server's tokenizer has them. Raises ServerFault."""
    said = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    tokens = said.get("tokens") if isinstance(said, dict) else None
    if not tokens or len(tokens) < 2:
        raise ServerFault(f"{server.url}/tokenize: the text has {len(tokens or ()):,} tokens, at least 2 are needed")
    return list(tokens)


def check_equal(ours: Sequence[int], server: Server, theirs: Sequence[int], other: Server) -> None:
    """Raises ServerFault where two servers have other tokens for a text: the one's mean nothing to the other."""
    if ours == theirs:
        return
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    raise ServerFault(
        f"{server.url} has {len(ours):,} tokens for the text, {other.url} {len(theirs):,}; "
        f"the first {at:,} of them are equal, all must be"
    )


def cut(tokens: Sequence[int], window: int) -> list[Sequence[int]]:
    """Stretches of at most `window` tokens, each beginning with the last one's last: all but the first are scored."""
    return [tokens[at : at + window] for at in range(0, len(tokens) - 1, window - 1)]


def scored(
    server: Server, stretches: Sequence[Sequence[int]], k: int, at_once: int, on_window: Callable[[], None]
) -> list[Window]:
    """In their order, each with the `k` most likely tokens at each place. Raises ServerFault."""

    def one(stretch: Sequence[int]) -> Window:
        asked = {"prompt": list(stretch), "echo": True, "logprobs": k, "max_tokens": 1}  # 0 is not taken everywhere
        window = window_of(server, server.complete(asked), len(stretch), k)
        on_window()
        return window

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, stretches))


def window_of(server: Server, answer: Json, n: int, k: int) -> Window:
    """Of a completion that begins with `n` tokens of its prompt.

    Raises ServerFault where they are not scored, or where of `k` most likely tokens none is told.
    """
    try:
        told = answer["choices"][0]["logprobs"]
        logprobs = tuple(float(one) for one in told["token_logprobs"][1:n])
        tops = tuple(dict(top or {}) for top in told["top_logprobs"][1:n])
        first = answer["choices"][0]["text"][: told["text_offset"][1]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerFault(f"{server.url}: the answer has no log probabilities of its prompt") from error
    if not len(logprobs) == len(tops) == n - 1:
        raise ServerFault(f"{server.url}: {len(logprobs):,} tokens of a prompt of {n:,} have log probabilities")
    if k and not all(tops):
        raise ServerFault(f"{server.url}: the answer has 0 of {k} most likely tokens at one of its prompt's {n:,}")
    return Window(logprobs, tops, len(first.encode()))
