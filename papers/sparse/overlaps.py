"""Overlaps of requests with retained entries, on counterparts of the paper's three data sets (figure 1)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from headwater.traces.arrivals import Poisson, in_order, sessions_of
from headwater.traces.request import TOKEN_BYTES, Request, Trace
from papers.figure import BOX, Found, Line, Shape, quantile, quantiles
from papers.lab import Lab

PAGE = 64  # the paper's block: KV is kept in these, so that a shorter overlap is none
HEAD = PAGE * TOKEN_BYTES  # compared first: most entries are of other documents


@dataclass(frozen=True, slots=True)
class Overlap:
    """Overlap of one request with the retained entries. Tokens."""

    length: int  # of its prompt, which is the entry that it leaves
    depth: int = 0  # of its longest common prefix with a retained entry; 0: it is shorter than a page
    entry: int = -1  # number of the request that left that entry; the newest of equal ones


def overlaps(requests: Sequence[Request], retained: int) -> list[Overlap]:
    """Return each request's overlap with the last `retained` entries. A continuation of an entry replaces it."""
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
    """Return the length of the longest common prefix of two prompts of one namespace."""
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


@dataclass(frozen=True, slots=True)
class Dataset:
    """A data set: `passes` over it make the paper's 10 thousand requests; the last `entries` are retained."""

    name: str  # the paper's
    ours: str
    files: tuple[str, ...]
    passes: int
    entries: int
    load: Poisson

    def trace(self, lab: Lab) -> Trace:
        """Return all files as one trace. Each has its own namespace, because each counts its words from 0."""
        requests = [
            replace(request, session=f"{name} {request.session}", namespace=name)
            for name in self.files
            for request in lab.trace(name).requests
        ]
        return Trace(self.ours, shuffled(requests, f"{self.name} {lab.seed}"))

    def seen(self, lab: Lab) -> list[Overlap]:
        """Return the overlap of each request with the retained entries; the lab records the data that was used."""
        requests = self.order(lab)
        lab.note(Trace(self.ours, requests), f"the last {self.entries} entries", PAGE, str(self.load))
        return overlaps(requests, self.entries)

    def order(self, lab: Lab) -> list[Request]:
        """Return the requests of all passes, with sessions in another order in each."""
        whole = self.trace(lab)
        made = []
        for number in range(self.passes):
            again = replace(whole, requests=shuffled(whole.requests, f"{self.name} {lab.seed} pass {number}"))
            made += [request for _, request in in_order(self.load.over(again, lab.seed + number))]
        return made


def shuffled(requests: Sequence[Request], seed: str) -> tuple[Request, ...]:
    """Shuffle the sessions; each keeps the order of its requests."""
    sessions = sessions_of(requests)
    random.Random(seed).shuffle(sessions)
    return tuple(request for session in sessions for request in session)


QUALITY = Dataset("QuALITY", "squality", ("squality/train", "squality/dev", "squality/test"), 16, 32, Poisson(1.0, 5.0))
NARRATIVE = Dataset(
    "NarrativeQA",
    "text_standardebooks",
    ("text_standardebooks/train", "text_standardebooks/valid"),
    5,
    32,
    Poisson(0.1, 5.0),
)
PROMPTS = Dataset("System Prompts", "prompts_claude_code", ("prompts_claude_code/families",), 5, 32, Poisson(1.0, 5.0))
DATASETS = (QUALITY, NARRATIVE, PROMPTS)


BINS = (64, 256, 1024, 4096, 16_384, 65_536, 131_072)  # tokens


def fig1(lab: Lab) -> Found:
    depths: dict[str, list[int]] = {}
    shares: dict[str, list[float]] = {}
    lines = []
    for dataset in DATASETS:
        seen = dataset.seen(lab)
        hits = [overlap for overlap in seen if overlap.depth]
        depths[dataset.name] = [overlap.depth for overlap in hits]
        shares[dataset.name] = [overlap.depth / seen[overlap.entry].length for overlap in hits]
        lines.append(Line(f"{dataset.name}: requests that overlap", None, 100 * len(hits) / len(seen), "%"))
        lines += _lines(dataset.name, depths[dataset.name])
        lines.append(Line(f"{dataset.name}: median share of the entry", None, quantile(shares[dataset.name], 0.5)))
    spread = [quantile(depths[NARRATIVE.name], q) for q in BOX]
    prompts = depths[PROMPTS.name]
    return Found(
        lines,
        Shape(
            "most of QuALITY's overlaps end within 5% of the entry's end", quantile(shares[QUALITY.name], 0.5) > 0.95
        ),
        Shape(
            "NarrativeQA's overlaps spread widely: the upper quartile is more than twice the lower",
            spread[3] > 2 * spread[1],
        ),
        Shape(
            "most overlaps of System Prompts are at most a tenth of the deepest",
            quantile(prompts, 0.5) < max(prompts) / 10,
        ),
    )


def _lines(name: str, depths: list[int]) -> list[Line]:
    lines = quantiles(f"{name}: depth", depths, "tokens")
    for low, high in pairwise(BINS):
        share = sum(low <= depth < high for depth in depths) / len(depths)
        if share:
            lines.append(Line(f"{name}: {low:,} to {high - 1:,} tokens", None, 100 * share, "%"))
    return lines
