"""Detokenizer: generated tokens to text of whole characters, without what may begin a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer, decoders

from headwater.request import SamplingParams, Thought


class TextStream:
    """The text of one request's output, token by token; amortised O(1) a token.

    All that `push` and `flush` return, joined, is the decoded output without special tokens but `shown_tokens`, cut
    before the stop string that is complete first (of two that end on the same character the longer one). Stop strings
    that begin in the first `min_tokens` tokens, or in the thought, are text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], params: SamplingParams) -> None:
        self._decoder = decoder_for(tokenizer, prompt_tail, frozenset(params.shown_tokens))
        self._stop = StopStrings(params.stop)
        self._too_short = params.min_tokens  # further tokens whose text is not searched for stop strings
        self._thought = ThoughtText(params.thought) if params.thought and params.stop else None

    def push(self, token: int) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that was hit; the text ends before that."""
        text = self._decoder.push(token)
        thought, text = self._thought.split(text) if self._thought else ("", text)
        if self._too_short > 0:
            self._too_short -= 1
            return thought + text, None
        shown, hit = self._stop.push(text)
        return thought + shown, hit

    def flush(self) -> str:
        """Return the text held back: an incomplete character as U+FFFD, and a possible beginning of a stop string."""
        last = self._decoder.flush()
        thought, text = self._thought.split(last, ended=True) if self._thought else ("", last)
        shown, hit = self._stop.push(text)
        return thought + (shown if hit is not None else shown + self._stop.flush())


class ThoughtText:
    """Splits a text that comes in pieces after the reasoning that it begins with."""

    def __init__(self, tags: Thought) -> None:
        self._tags = tags
        self._inside: bool | None = True if tags.begun else None  # None: it may still begin
        self._held = ""  # undecided text, or an end of the thought that may begin its closing tag

    def split(self, text: str, ended: bool = False) -> tuple[str, str]:
        """Return the next piece's part in the thought, and the rest. `ended`: no more text comes."""
        if self._inside is None:
            self._held += text
            begun = self._held.lstrip()
            if not ended and len(begun) < len(self._tags.open) and self._tags.open.startswith(begun):
                return "", ""
            text, self._held = self._held, ""
            self._inside = begun.startswith(self._tags.open)
        if not self._inside:
            return "", text
        seen = self._held + text
        end = seen.find(self._tags.close)
        if end < 0:
            self._held = seen[-len(self._tags.close) + 1 :]
            return text, ""
        self._inside, after = False, len(seen) - end - len(self._tags.close)
        return text[: len(text) - after], text[len(text) - after :]


class StopStrings:
    """Looks for stop strings in a text that comes in pieces, however it is cut."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = tuple(s for s in stop if s)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""  # a proper prefix of a stop string, so shorter than the longest

    def push(self, text: str) -> tuple[str, str | None]:
        window = self._held + text
        hit = self._first_hit(window)
        if hit is not None:
            self._held = ""
            start, stop = hit
            return window[:start], stop
        keep = self._possible_start(window)
        self._held = window[keep:]
        return window[:keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_hit(self, window: str) -> tuple[int, str] | None:
        """Start and stop string of the hit that ends first, so that how the text is cut into pieces cannot matter."""
        found = ((window.find(s), s) for s in self._stop)
        hits = [(start + len(s), start, s) for start, s in found if start >= 0]
        return min(hits)[1:] if hits else None

    def _possible_start(self, window: str) -> int:
        """Return the begin of the longest end of `window` that is also the beginning of a stop string."""
        for start in range(max(0, len(window) - self._longest + 1), len(window)):
            if any(s.startswith(window[start:]) for s in self._stop):
                return start
        return len(window)


class ByteLevelDecoder:
    """For byte-level BPE: each token is some bytes, and text is the UTF-8 of their concatenation."""

    def __init__(self, table: ByteTable, shown: frozenset[int]) -> None:
        self._table = table
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._table.raw(token) if token in self._shown else self._table.shown(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class GenericDecoder:
    """For any other tokenizer, by its own decoder; what precedes a token may change its text (a leading space)."""

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], shown: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._stream = decoders.DecodeStream(ids=list(prompt_tail), skip_special_tokens=True)
        self._waiting: list[int] = []  # tokens whose text is not whole yet

    def push(self, token: int) -> str:
        if token in self._shown:
            before, self._waiting = self.flush(), []
            return before + (self._tokenizer.id_to_token(token) or "")
        self._waiting.append(token)
        text = self._stream.step(self._tokenizer, token)
        if text is None:
            return ""
        self._waiting.clear()
        return text

    def flush(self) -> str:
        return self._tokenizer.decode(self._waiting)


def decoder_for(
    tokenizer: Tokenizer, prompt_tail: Sequence[int], shown: frozenset[int]
) -> ByteLevelDecoder | GenericDecoder:
    """Return a decoder: tokens in, whole characters out; of special tokens only those in `shown` have text."""
    table = byte_table(tokenizer)
    return GenericDecoder(tokenizer, prompt_tail, shown) if table is None else ByteLevelDecoder(table, shown)


class ByteTable:
    """The bytes of every token of a byte-level tokenizer. Ids that it does not know have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._bytes = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for text, token in vocabulary.items():
            self._bytes[token] = _token_bytes(text)
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}

    def raw(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""

    def shown(self, token: int) -> bytes:
        """Likewise, but special tokens are not for readers."""
        return b"" if token in self._special else self.raw(token)


_tables: dict[int, tuple[Tokenizer, ByteTable | None]] = {}


def byte_table(tokenizer: Tokenizer) -> ByteTable | None:
    """The tokenizer's byte table, made once; None if it is not a byte-level one."""
    if id(tokenizer) not in _tables:  # the tokenizer is kept with its table, so its id stays its own
        table = ByteTable(tokenizer) if isinstance(tokenizer.decoder, decoders.ByteLevel) else None
        _tables[id(tokenizer)] = (tokenizer, table)
    return _tables[id(tokenizer)][1]


def _token_bytes(text: str) -> bytes:
    """A token as the vocabulary spells it, in bytes; a spelling with any other character stands for itself."""
    alphabet = _byte_alphabet()
    try:
        return bytes(alphabet[c] for c in text)
    except KeyError:
        return text.encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """The character for each byte in byte-level BPE (GPT-2): itself if printable in Latin-1, else 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
