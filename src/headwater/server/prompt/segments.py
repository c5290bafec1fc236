"""Texts with segments to tokens: each segment by itself, so that its tokens do not depend on its neighbours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from headwater.config import DEFAULT_SEPARATOR
from headwater.request import Span
from headwater.server.prompt.encoding import Encoded, PromptEncoder, encode
from headwater.server.prompt.marks import Edge, Mark, resolved, separators

MAX_SEGMENTS = 1_024  # of one request


class SegmentEncoder:
    """Encodes prompts part by part: what is before the first segment, each segment, and what is between and after.

    Where the tokenizer has an added token for the separator, that begins each part but the first; otherwise nothing of
    a separator is left. A separator that is no mark is encoded as plain characters, never as that token. Thread safe.
    """

    def __init__(self, tokenizer: Tokenizer, separator: str = DEFAULT_SEPARATOR) -> None:
        self.separator = separator
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer)
        added = {token.content: id_ for id_, token in tokenizer.get_added_tokens_decoder().items()}
        self._token = added.get(separator)
        first, rest = re.escape(separator[0]), re.escape(separator[1:])
        self._within = re.compile(f"(?<={first})(?={rest})")
        self._before, self._after = _frame(tokenizer)

    def encode(self, text: str, marks: Sequence[Mark] = (), namespace: str = "") -> Encoded:
        """Without tokens that are added to a text; `ends` are in characters of the text with its marks."""
        if not marks and (self._token is None or self.separator not in text):
            return self._encoder.encode(text, namespace)
        marks = resolved(marks)
        starts, stops = [0, *(mark.end for mark in marks)], [*(mark.start for mark in marks), len(text)]
        parts = [self._plain(text[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        encoded = iter(self._encoder.encode_each([piece for part in parts for piece in part], namespace))
        ids: list[int] = []
        ends: list[int] = []
        cuts: list[int] = []
        for number, (at, part) in enumerate(zip(starts, parts, strict=True)):
            if number:
                cuts.append(len(ids))
                ids += self._kept
                ends += [at] * len(self._kept)
            for piece in part:
                known = next(encoded)
                ids += known.ids
                ends += [at + end for end in known.ends]
                at += len(piece)
        opens = [mark.edge is Edge.OPEN for mark in marks]
        return Encoded(tuple(ids), ends, spans(cuts, opens, len(ids), len(self._kept)))

    def encode_prompt(self, text: str, add_special_tokens: bool = True, namespace: str = "") -> Encoded:
        """A text that is markup as a whole, as a completion's prompt is; with the tokens that begin and end a text."""
        marks = separators(text, self.separator)
        if not marks:
            whole = encode(self._tokenizer, text, add_special_tokens)
            return Encoded(tuple(whole.ids), [end for _, end in whole.offsets])
        inner = self.encode(text, marks, namespace)
        if not add_special_tokens:
            return inner
        before, after = self._before, self._after
        ends = [*[0] * len(before), *inner.ends, *[len(text)] * len(after)]
        return Encoded((*before, *inner.ids, *after), ends, _shifted(inner.segments, len(before)))

    def encode_segment(self, text: str, namespace: str = "") -> tuple[int, ...]:
        """The tokens that this text has as a segment of a prompt."""
        return self.encode(text, [Mark(0, 0, Edge.OPEN)], namespace).ids

    def segments_of(self, ids: Sequence[int]) -> tuple[Span, ...]:
        """Those of a prompt of token ids, where the separator is a token."""
        begin = len(self._before) if tuple(ids[: len(self._before)]) == self._before else 0
        inner = ids[begin:]
        cuts = [at for at, token in enumerate(inner) if token == self._token]
        opens = [at < cuts[-1] for at in cuts]
        return _shifted(spans(cuts, opens, len(inner), len(self._kept)), begin)

    @property
    def _kept(self) -> tuple[int, ...]:
        """What of a separator is in the prompt."""
        return () if self._token is None else (self._token,)

    def _plain(self, text: str) -> list[str]:
        """The text in pieces, none of which holds the separator if it is a token."""
        return [text] if self._token is None else self._within.split(text)


def spans(cuts: Sequence[int], opens: Sequence[bool], end: int, separator: int) -> tuple[Span, ...]:
    """The segments of a prompt of `end` tokens that is cut at these positions; `separator`: its tokens at each cut.

    A segment that nothing precedes is the leading part, kept whole by prefix caching, and is not among them; but one
    that nothing follows either is: it was sent so that it is stored.
    """
    alone = len(cuts) == 2 and cuts[-1] + separator == end
    ends = [*cuts[1:], end][: len(cuts)]
    found = zip(cuts, ends, opens, strict=True)
    return tuple(Span(a, b) for a, b, is_open in found if is_open and b > a and (a > 0 or alone))


def _shifted(segments: Sequence[Span], tokens: int) -> tuple[Span, ...]:
    return tuple(replace(span, start=span.start + tokens, end=span.end + tokens) for span in segments)


def _frame(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens that the tokenizer puts before and after each text."""
    example = encode(tokenizer, "a", add_special_tokens=True)
    own = [at for at, special in enumerate(example.special_tokens_mask) if not special]
    if not own:
        return (), ()
    return tuple(example.ids[: own[0]]), tuple(example.ids[own[-1] + 1 :])
