"""Synthetic RAG traffic: prompts of documents in random order, popular ones more often, and a question."""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

from headwater.errors import ConfigError
from headwater.request import Boundaries, Fidelity, Span
from headwater.traces.documents import texts_of
from headwater.traces.request import Request, Trace
from headwater.traces.source import MALFORMED, Source, find
from headwater.traces.tokens import Tokens

SPREAD = 0.5  # of the logarithm of a document's length


@dataclass(frozen=True, slots=True)
class Rag:
    """`sessions` with `turns` questions each about their documents, `fewest` to `most` of them.

    Of `documents` the r-th is drawn in proportion to 1/r^zipf, none twice in a session. They have `tokens` tokens in
    the median, log-normally distributed; or are the texts of a file of passages or documents, each of its own length.
    """

    sessions: int = 1000
    zipf: float = 1.0
    documents: int = 1000
    texts: str = ""  # a file below --data, instead of drawn documents
    fewest: int = 4
    most: int = 16
    turns: int = 1
    tokens: int = 512
    system: int = 256
    question: int = 32
    answer: int = 128
    fidelity: str = "balanced"

    def trace(self, name: str, tokens: Tokens, data: Path | None = None, seed: int = 0) -> Trace:
        """Draw the trace, the same for the same seed. Raises ConfigError for options, TraceError for texts."""
        self._check()
        rng = random.Random(f"rag {seed}")
        shelf = self._shelf(tokens, data, rng)
        if self.most > len(shelf):
            raise ConfigError(f"most is {self.most:,}, there are {len(shelf):,} documents")
        unused = count(1 + max(max(document) for document in shelf))
        system, weights = _new(unused, self.system), [rank**-self.zipf for rank in range(1, len(shelf) + 1)]
        requests: list[Request] = []
        for session in range(self.sessions):
            drawn = _drawn(weights, rng.randint(self.fewest, self.most), rng)
            asked = self._session(str(session), system, [shelf[number] for number in drawn], unused)
            requests += [replace(request, fidelity=Fidelity(self.fidelity)) for request in asked]
        lengths = [len(document) for document in shelf]
        note = f"{len(shelf):,} documents of {min(lengths):,} to {max(lengths):,} tokens, {sum(lengths):,} in all"
        return Trace(name, requests, notes=(note,))

    def _check(self) -> None:
        for name in ("sessions", "documents", "fewest", "turns", "tokens", "question"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.fidelity not in tuple(Fidelity):
            raise ConfigError(f"fidelity is {self.fidelity!r}, must be one of {', '.join(Fidelity)}")
        if self.most < self.fewest:
            raise ConfigError(f"most is {self.most:,}, must be at least fewest, which is {self.fewest:,}")
        if min(self.zipf, self.system, self.answer) < 0:
            raise ConfigError(f"zipf, system and answer are {self.zipf:g}, {self.system}, {self.answer}: 0 at least")

    def _shelf(self, tokens: Tokens, data: Path | None, rng: random.Random) -> list[array[int]]:
        """Return the documents, the most popular one first. Popularity does not depend on length."""
        if self.texts:
            found = [ids for text in _texts(Path(self.texts), data) if (ids := tokens.of(text))]
            rng.shuffle(found)
            return found[: self.documents]
        unused = count()
        lengths = (rng.lognormvariate(math.log(self.tokens), SPREAD) for _ in range(self.documents))
        return [_new(unused, max(1, round(length))) for length in lengths]

    def _session(
        self, name: str, system: array[int], documents: Sequence[array[int]], unused: Iterator[int]
    ) -> list[Request]:
        ids, spans = system[:], []
        for document in documents:
            spans.append(Span(len(ids), len(ids) + len(document)))
            ids += document
        ends, asked = [], len(system)
        for _ in range(self.turns):
            ids += _new(unused, self.question)
            ends.append((asked, len(ids)))
            ids += _new(unused, self.answer)
            asked = len(ids)
        text = ids.tobytes()
        return [
            Request(
                name,
                text,
                end,
                self.answer,
                end + self.answer,
                boundaries=Boundaries(len(system), begin, end - 1),
                segments=tuple(spans),
            )
            for begin, end in ends
        ]


def _new(unused: Iterator[int], tokens: int) -> array[int]:
    """Return a text of token ids that were never used before."""
    return array("i", islice(unused, tokens))


def _drawn(weights: Sequence[float], count: int, rng: random.Random) -> list[int]:
    """Draw `count` different numbers in proportion to their weights, in random order.

    The smallest of exponential variables with these rates are such a sample (Efraimidis and Spirakis 2006).
    """
    drawn = heapq.nsmallest(count, range(len(weights)), key=lambda number: rng.expovariate(weights[number]))
    rng.shuffle(drawn)
    return drawn


def _texts(file: Path, data: Path | None) -> list[str]:
    """Return the texts of a file in its order, each once."""
    source = Source(find(file, data))
    try:
        return list(dict.fromkeys(text for record in source.records() for text in texts_of(record)))
    except MALFORMED as error:
        raise source.malformed(error) from error
