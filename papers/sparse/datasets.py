"""What stands for the paper's three data sets, and in which order their requests come."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from headwater.traces.arrivals import Poisson, in_order, sessions_of
from headwater.traces.request import Request, Trace
from papers.lab import Lab, Used
from papers.sparse.overlap import PAGE, Overlap, overlaps


@dataclass(frozen=True, slots=True)
class Dataset:
    """`passes` over all of it make the paper's 10 thousand requests; the last `entries` are retained."""

    name: str  # the paper's
    ours: str
    files: tuple[str, ...]
    passes: int
    entries: int
    load: Poisson

    def trace(self, lab: Lab) -> Trace:
        """All files as one trace. Each has a namespace of its own, because each counts its words from 0."""
        requests = [
            replace(request, session=f"{name} {request.session}", namespace=name)
            for name in self.files
            for request in lab.trace(name).requests
        ]
        return Trace(self.ours, shuffled(requests, f"{self.name} {lab.seed}"))

    def seen(self, lab: Lab) -> list[Overlap]:
        """How deep each of the requests overlaps what is retained; the lab notes what was used."""
        requests = self.order(lab)
        tokens = sum(request.prompt_tokens for request in requests)
        lab.used[Used(self.ours, len(requests), tokens, f"the last {self.entries} entries", PAGE, str(self.load))] = (
            None
        )
        return overlaps(requests, self.entries)

    def order(self, lab: Lab) -> list[Request]:
        """Pass after pass, sessions in another order each time."""
        whole = self.trace(lab)
        made = []
        for number in range(self.passes):
            again = replace(whole, requests=shuffled(whole.requests, f"{self.name} {lab.seed} pass {number}"))
            made += [request for _, request in in_order(self.load.over(again, lab.seed + number))]
        return made


def shuffled(requests: list[Request] | tuple[Request, ...], seed: str) -> tuple[Request, ...]:
    """Sessions in another order, each as it is."""
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
