"""Made traffic: chats that grow, behind one system prompt, some of them over documents that several share."""

from __future__ import annotations

import random
from array import array

from headwater.request import Boundaries
from headwater.traces.request import Request, Trace

SYSTEM = 640  # tokens
TURNS, SAID, ANSWERED = (3, 8), (100, 900), (60, 300)  # from, to


class Texts:
    """Token ids that were never there before."""

    def __init__(self) -> None:
        self._next = 0

    def new(self, count: int) -> array[int]:
        self._next += count
        return array("i", range(self._next - count, self._next))


def workload(sessions: int, seed: int, documents: int = 0, rate: float = 1.0, think: float = 10.0) -> Trace:
    """`rate` sessions a second begin, `think` seconds pass between turns; half of all read one of the documents."""
    rng, texts = random.Random(seed), Texts()
    system = texts.new(SYSTEM)
    shelf = [texts.new(rng.randint(1500, 6000)) for _ in range(documents)]
    requests: list[Request] = []
    start = 0.0
    for session in range(sessions):
        start += rng.expovariate(rate)
        begin = system + (rng.choice(shelf) if shelf and rng.random() < 0.5 else array("i"))
        requests += _session(str(session), begin, start, think, rng, texts)
    requests.sort(key=lambda request: request.at or 0.0)
    return Trace("made", tuple(requests))


def _session(
    name: str, begin: array[int], start: float, think: float, rng: random.Random, texts: Texts
) -> list[Request]:
    ids, ends = begin, []
    for _ in range(rng.randint(*TURNS)):
        asked = ids + texts.new(rng.randint(*SAID))
        ids = asked + texts.new(rng.randint(*ANSWERED))
        ends.append((len(asked), len(ids)))
    text, requests = ids.tobytes(), []
    for asked_end, end in ends:
        known = Boundaries(SYSTEM, None, asked_end - 1)
        requests.append(Request(name, text, asked_end, end - asked_end, end, start, boundaries=known))
        start += rng.expovariate(1 / think)
    return requests
