"""How deep each request overlaps the entries that are retained: the paper's setting, without a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headwater.traces.request import TOKEN_BYTES, Request

PAGE = 64  # the paper's block: KV is kept in these, so that a shorter overlap is none
HEAD = PAGE * TOKEN_BYTES  # compared first: most entries are of other documents


@dataclass(frozen=True, slots=True)
class Overlap:
    """One request in its turn. Tokens."""

    length: int  # of its prompt, which is the entry that it leaves
    depth: int = 0  # of its longest common prefix with a retained entry; 0: it is shorter than a page
    entry: int = -1  # number of the request that left that entry; the newest of equal ones


def overlaps(requests: Sequence[Request], retained: int) -> list[Overlap]:
    """Each request's overlap with the last `retained` entries. One that goes on where an entry ends takes its place."""
    entries: dict[int, Request] = {}  # by number, oldest first
    found = []
    for number, request in enumerate(requests):
        best, entry = 0, -1
        for other in reversed(entries):
            depth = common_tokens(request, entries[other])
            if depth > best:
                best, entry = depth, other
        depth = min(best, request.prompt_tokens - 1)
        found.append(Overlap(request.prompt_tokens, *((depth, entry) if depth >= PAGE else ())))
        if entry >= 0 and best == entries[entry].prompt_tokens:
            del entries[entry]
        entries[number] = request
        if len(entries) > retained:
            del entries[next(iter(entries))]
    return found


def common_tokens(a: Request, b: Request) -> int:
    """Length of the longest common prefix of two prompts of one namespace."""
    shorter = min(a.prompt_tokens, b.prompt_tokens)
    if a.namespace != b.namespace:
        return 0
    if a.text is b.text:
        return shorter
    if a.text[:HEAD] == b.text[:HEAD]:
        return _first_difference(a.text, b.text, shorter)
    return _first_difference(a.text, b.text, min(shorter, PAGE))


def _first_difference(a: bytes, b: bytes, tokens: int) -> int:
    differ = np.frombuffer(a, np.int32, tokens) != np.frombuffer(b, np.int32, tokens)
    first = int(differ.argmax()) if tokens else 0
    return first if tokens and differ[first] else tokens
