"""Encoding of prompts. Pieces between tokens that always split the text are encoded once for each namespace."""

from __future__ import annotations

import json
import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tokenizers import AddedToken, Encoding, Tokenizer, models, normalizers, pre_tokenizers

from headwater.errors import RequestTooLarge
from headwater.request import Span

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
CACHE_BYTES = 64 * 2**20
MIN_CACHED_CHARACTERS = 64  # encoding a shorter piece is faster than a cache of it
MIN_COUNTED_CHARACTERS = 4  # for each token of the limit: a longer text is counted before it is encoded
SLICE_CHARACTERS = 64 * 2**10  # counted at once
SEAM_TOKENS = 64  # by which the count of a slice may differ from its part of the whole
MAX_NFC_SHRINK = 4  # factor by which normalisation may shorten a text in UTF-8; its worst case is 3
ENTRY_OVERHEAD_BYTES = 400  # bytes of an entry besides its text and its numbers


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a text, and the segments among them."""

    ids: tuple[int, ...]
    ends: Sequence[int]  # of each token, in characters of the text, ascending
    segments: tuple[Span, ...] = ()  # of the ids


Piece: TypeAlias = "tuple[array[int], array[int]]"  # token ids, and their ends within the piece


def whole_characters(text: str) -> str:
    """Replace halves of surrogate pairs, sent by clients that cut texts by UTF-16 units, by U+FFFD."""
    return LONE_SURROGATE.sub("\ufffd", text)


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Encoding:
    """Encode as a batch of one: `Tokenizer.encode` holds the GIL, for 25 ms with 16,000 tokens."""
    return tokenizer.encode_batch([whole_characters(text)], add_special_tokens=add_special_tokens)[0]


def check_length(tokenizer: Tokenizer, text: str, limit: int, token_bytes: int | None) -> None:
    """Raise RequestTooLarge for a text that certainly has more than `limit` tokens, before it is encoded.

    Encoding takes 560 bytes for each token, so a long text is counted in slices first, up to the limit.
    """
    if len(text) <= MIN_COUNTED_CHARACTERS * limit:
        return
    found = 0 if token_bytes is None else len(text) // token_bytes
    if found <= limit:
        found = 0
        for start in range(0, len(text), SLICE_CHARACTERS):
            found += max(
                0,
                len(encode(tokenizer, text[start : start + SLICE_CHARACTERS], add_special_tokens=False)) - SEAM_TOKENS,
            )
            if found > limit:
                break
    if found > limit:
        raise RequestTooLarge(f"prompt has {found:,} tokens or more, {limit:,} are accepted with the answer")


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the most bytes of UTF-8 that one token can stand for; None if unknown.

    It is known for byte-level BPE, which drops nothing: any text of n bytes has at least n / longest tokens.
    """
    model, parts = tokenizer.model, tokenizer.pre_tokenizer
    if not isinstance(model, models.BPE) or not _splits_only(parts):
        return None
    if not (tokenizer.normalizer is None or isinstance(tokenizer.normalizer, normalizers.NFC)):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    if (
        any(token.lstrip or token.rstrip for token in added)
        or not set(pre_tokenizers.ByteLevel.alphabet()) <= vocab.keys()
    ):
        return None
    longest = max(*map(len, vocab), *(len(token.content.encode()) for token in added))
    return longest if tokenizer.normalizer is None else MAX_NFC_SHRINK * longest


def _splits_only(part: Any) -> bool:
    """Return whether a pre-tokenizer maps bytes to characters and splits, and removes nothing."""
    if part is None:
        return False
    state: bytes = part.__getstate__()
    described = json.loads(state)
    kinds = [described, *described.get("pretokenizers", ())]
    plain = all(one["type"] in ("Sequence", "Split", "Digits", "ByteLevel") for one in kinds)
    return plain and any(one["type"] == "ByteLevel" for one in kinds) and b"Removed" not in state


class PromptEncoder:
    """Encoder of prompts that keeps encoded pieces; ids and ends are those of the whole text. Thread safe.

    A text is cut before each token that always splits it, such as <|im_start|>, and the pieces are encoded separately:
    of a growing chat only the new messages are encoded. Pieces are kept in at most `capacity` bytes; the least recently
    used are dropped first. A namespace cannot observe the pieces of another, not even by timing. No special tokens are
    added.
    """

    def __init__(self, tokenizer: Tokenizer, capacity: int = CACHE_BYTES) -> None:
        self._tokenizer = tokenizer
        self._capacity = capacity
        self._kept: OrderedDict[tuple[str, str], Piece] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0  # held by kept pieces
        tokens = splitting_tokens(tokenizer)
        self._cut = re.compile(f"(?={'|'.join(map(re.escape, tokens))})") if tokens else None

    def encode(self, text: str, namespace: str = "") -> Encoded:
        """Encode a text."""
        pieces = self._pieces(text)
        return self._joined(pieces, self._encoded(pieces) if len(pieces) < 2 else self._known(pieces, namespace))

    def encode_each(self, texts: Sequence[str], namespace: str = "") -> list[Encoded]:
        """Encode each text separately, and keep it even if it is one piece, since segments are reused."""
        pieces = [self._pieces(text) for text in texts]
        known = iter(self._known([piece for cut in pieces for piece in cut], namespace))
        return [self._joined(cut, [next(known) for _ in cut]) for cut in pieces]

    def _pieces(self, text: str) -> list[str]:
        text = whole_characters(text)
        return [piece for piece in self._cut.split(text) if piece] if self._cut else [text]

    def _known(self, pieces: Sequence[str], namespace: str) -> list[Piece]:
        """Return the kept encodings, and encode and keep the others."""
        keys = [(namespace, piece) for piece in pieces]
        with self._lock:
            found = {key: self._kept[key] for key in keys if key in self._kept}
            for key in found:
                self._kept.move_to_end(key)
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        new = dict(zip(missing, self._encoded([piece for _, piece in missing]), strict=True))
        with self._lock:
            for key, piece in new.items():
                self._keep(key, piece)
        known = found | new
        return [known[key] for key in keys]

    def _encoded(self, pieces: list[str]) -> list[Piece]:
        encodings = self._tokenizer.encode_batch(pieces, add_special_tokens=False)
        return [(array("I", e.ids), array("I", [end for _, end in e.offsets])) for e in encodings]

    def _joined(self, pieces: list[str], encoded: list[Piece]) -> Encoded:
        ids, ends, start = array("I"), array("I"), 0
        for piece, (piece_ids, piece_ends) in zip(pieces, encoded, strict=True):
            ids.extend(piece_ids)
            ends.extend([start + end for end in piece_ends] if start else piece_ends)
            start += len(piece)
        return Encoded(tuple(ids), ends)

    def _keep(self, key: tuple[str, str], piece: Piece) -> None:
        size = entry_bytes(key, piece)
        if len(key[1]) < MIN_CACHED_CHARACTERS or size > self._capacity or key in self._kept:
            return
        self._kept[key] = piece
        self.bytes += size
        while self.bytes > self._capacity:
            self.bytes -= entry_bytes(*self._kept.popitem(last=False))


def entry_bytes(key: tuple[str, str], piece: Piece) -> int:
    """Return the memory of a kept piece."""
    ids, _ = piece
    return sys.getsizeof(key[0]) + sys.getsizeof(key[1]) + 2 * len(ids) * ids.itemsize + ENTRY_OVERHEAD_BYTES


def splitting_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the added tokens that always split a text, so that the tokens before and after are independent.

    They are matched before any normalisation, absorb no white space, and overlap with no other added token. Their first
    character is not part of a word, and a token before them can depend on no more than that.
    """
    if tokenizer.encode_special_tokens:
        return []
    added = list(tokenizer.get_added_tokens_decoder().values())
    return sorted(t.content for t in added if t.special and _stands_alone(t, [other.content for other in added]))


def _stands_alone(token: AddedToken, others: list[str]) -> bool:
    text = token.content
    plain = not (token.normalized or token.lstrip or token.rstrip or token.single_word)
    if not plain or not text or text[0].isalnum() or text[0] == "_" or text[0].isspace():
        return False
    return not any(overlap(text, other) for other in others)


def overlap(text: str, other: str) -> bool:
    """Return whether occurrences of the two texts, or two occurrences of one, can share characters."""
    if text != other and (text in other or other in text):
        return True
    shorter = min(len(text), len(other))
    return any(text[-size:] == other[:size] or other[-size:] == text[:size] for size in range(1, shorter))
