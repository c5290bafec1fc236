"""Segments in recordings: their hashes, and requests of page hashes as requests of tokens, which segments need.

Tokens of one page get one id, and so do those of one segment, wherever it stands; those behind the last full page are
like no others. So equal prefixes of whole pages, and equal segments, are equal ids.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from headwater.traces.request import BLOCK_BYTES, Request
from headwater.traces.segments import fidelity_of, spans_of


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request of page hashes, and the hash of each of its segments."""

    request: Request
    hashes: tuple[str, ...] = ()


def fields_of(request: Request, hashes: Sequence[str]) -> dict[str, object]:
    """What a line says of them: `segments` [[start, end, hash], ...] and `fidelity`; nothing where there are none."""
    if not request.segments:
        return {}
    named = [[span.start, span.end, name] for span, name in zip(request.segments, hashes, strict=True)]
    return {"segments": named, "fidelity": request.fidelity}


def recorded(request: Request, line: Mapping[str, Any]) -> Recorded:
    """The request with what its line says of segments. Raises ValueError for what is none."""
    told = line.get("segments") or ()
    pairs = [one[:2] for one in told]
    spans = spans_of({"segments": pairs}, request.prompt_tokens)
    return Recorded(replace(request, segments=spans, fidelity=fidelity_of(line)), tuple(str(one[2]) for one in told))


def as_tokens(requests: Sequence[Recorded], page: int) -> Iterator[Request]:
    """Each with token ids as its text."""
    ids: defaultdict[tuple[str, object], int] = defaultdict(count().__next__)
    for number, one in enumerate(requests):
        request = one.request
        pages = request.known_tokens // page
        hashes = (request.text[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] for at in range(pages))
        text: array[int] = array("i")
        for prefix in hashes:
            text += array("i", [ids[request.namespace, prefix]]) * page
        text += array("i", [ids["", number]]) * (request.known_tokens - pages * page)
        for span, name in zip(request.segments, one.hashes, strict=True):
            text[span.start : span.end] = array("i", [ids["segment", name]]) * (span.end - span.start)
        yield replace(request, text=text.tobytes())
