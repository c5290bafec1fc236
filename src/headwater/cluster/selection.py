"""Selection of the worker that a request goes to, from what a router knows of its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from headwater.cluster.cost import (
    Candidate,
    Choice,
    LeastCost,
    Outstanding,
    Prompt,
    holders,
    note_widespread,
    price_reads,
)
from headwater.cluster.digests import Digests
from headwater.cluster.disaggregation import decoder_after, decoders, keeper, may_be_apart, note_prefilled, prefiller
from headwater.cluster.preparing import Preparing, may_be_prepared, needed_by
from headwater.cluster.routed import Convolving, Holder, Routed


class Selectable(Holder, Protocol):
    """Worker, as a selection sees it."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of the index key's unit, which a digest stands for."""

    def candidate(self, prompt: Prompt) -> Candidate:
        """Return the worker as a choice for a prompt sees it."""


Worker = TypeVar("Worker", bound=Selectable)


class Selected(NamedTuple, Generic[Worker]):
    """The worker that a request goes to now, and others that take part. Tokens."""

    link: Worker
    outstanding: Outstanding
    predicted: int  # leading tokens that the worker is thought to have
    holders: tuple[Worker, ...]  # from which it is to pull
    is_loaded: bool  # whether it is to load a part of the prompt, or segments, from a store of its own
    decoder: Worker | None  # that is to go on after it, if it only prefills


class Selection:
    """A rule, and what it needs beside the workers. All methods are for the router's thread."""

    def __init__(
        self, key: bytes, choice: Choice, model: Convolving, preparing: Preparing, counts: Counter[str]
    ) -> None:
        """`key`: secret key of digests. `counts`: of requests, by what became of them."""
        self.choice = choice
        self._key, self._model, self._preparing, self._counts = key, model, preparing, counts

    def select(self, request: Routed, prompt: Prompt, links: Sequence[Worker]) -> Selected[Worker] | None:
        """Return the worker that a request goes to now; None: workers prepare its segments, and it waits for them."""
        candidates = [link.candidate(prompt) for link in links]
        if request.prefilled is not None and len(request.sent) == 1:  # it is being handed over
            note_prefilled(prompt, request.prefilled.name, candidates)
        price_reads(candidates)
        note_widespread(candidates)
        at = self._with_segments(request, prompt, links, candidates)
        if at is None:
            return None
        chosen = candidates[at]
        decoder = links[decoder_after(prompt, chosen, candidates)] if request.prefills else None
        outstanding = Outstanding(prompt, chosen.uncached(prompt), bool(request.sent))
        pulled_from = tuple(links[i] for i in holders(at, candidates))
        is_loaded = chosen.is_loaded or request.loads_segments
        return Selected(links[at], outstanding, chosen.reusable, pulled_from, is_loaded, decoder)

    def _with_segments(
        self, request: Routed, prompt: Prompt, links: Sequence[Worker], candidates: Sequence[Candidate]
    ) -> int | None:
        """Return the worker that a request goes to now; None: workers prepare its segments, and it waits for them."""
        if request.combiner in links:
            at = next(at for at, link in enumerate(links) if link is request.combiner)
            candidates[at].compose(prompt, request.composed)
            return at
        request.loads_segments = False
        chosen = self._chosen(request, prompt, candidates)
        if not may_be_prepared(request) or len(links) < 2 or not links[chosen].unit_bytes:
            return chosen
        digests = Digests(self._key, links[chosen].unit_bytes)
        needed = needed_by(request, digests, self._model.conv_taps)
        if not needed:
            return chosen
        combiners = decoders(candidates) if isinstance(self.choice, LeastCost) else [chosen]
        return self._preparing.combine(request, needed, prompt, links, candidates, combiners)

    def _chosen(self, request: Routed, prompt: Prompt, candidates: Sequence[Candidate]) -> int:
        """Return the worker that a request goes to now, and note in it whether that one prefills for another."""
        if request.prefilled is not None and request.follower is not None:
            names = [one.name for one in candidates]
            if request.follower.name in names:
                request.prefills = False
                return names.index(request.follower.name)  # it has read what was prefilled
        alone = None if request.sent or not may_be_apart(request.generation) else prefiller(prompt, candidates)
        request.prefills = alone is not None
        if alone is not None:
            self._counts["prefilled_apart"] += 1
            return alone
        serving = decoders(candidates)
        return serving[self.choice.choose(prompt, [candidates[i] for i in serving])]

    def keeper(self, request: Routed, answer: Prompt, decoded: str, links: Sequence[Worker]) -> Worker | None:
        """Return the worker that is to prefill a finished answer that was handed over; None: neither takes requests.

        `decoded`: the name of the worker that has decoded it.
        """
        assert request.prefilled is not None, "others cache their answers themselves"
        both = [link for link in links if link.name in (request.prefilled.name, decoded)]
        at = keeper(answer, [link.candidate(answer) for link in both], decoded)
        if at is None:
            return None
        self._counts["answers_apart"] += both[at].name != decoded
        return both[at]

    # -- what the rule is told of a request

    def begun(self, request: Routed) -> None:
        """Note that a request's worker has sent its first token."""
        if request.link is not None and request.outstanding is not None:
            request.link.outstanding.begin(request.outstanding)
            if not request.prefills:  # else the rule has not chosen it
                self.choice.begun(request.outstanding.prompt, request.link.name)

    def forget(self, request: Routed) -> None:
        """Note that a request's worker has it no more."""
        if request.link is not None and request.outstanding is not None:
            request.link.outstanding.remove(request.outstanding)
            if not request.prefills:
                self.choice.ended(request.outstanding.prompt, request.link.name)
        request.outstanding = None
