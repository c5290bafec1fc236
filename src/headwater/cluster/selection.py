"""Selection of a request's worker, from the router's knowledge of its workers."""

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
    """Worker that a selection chooses from."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of the unit of the index key that a digest covers."""

    def candidate(self, prompt: Prompt) -> Candidate:
        """Return the worker as a candidate for a prompt."""


Worker = TypeVar("Worker", bound=Selectable)


class Selected(NamedTuple, Generic[Worker]):
    """Worker of a request, and other workers that take part. Tokens."""

    link: Worker
    outstanding: Outstanding
    predicted: int  # leading tokens that the worker is expected to have
    holders: tuple[Worker, ...]  # from which it pulls
    is_loaded: bool  # whether it loads a part of the prompt, or segments, from its own store
    decoder: Worker | None  # that continues, if the worker only prefills


class Selection:
    """Selection of workers by a rule. All methods are for the router's thread."""

    def __init__(
        self, key: bytes, choice: Choice, model: Convolving, preparing: Preparing, counts: Counter[str]
    ) -> None:
        """`key`: secret key of digests. `counts`: of requests, by outcome."""
        self.choice = choice
        self._key, self._model, self._preparing, self._counts = key, model, preparing, counts

    def select(self, request: Routed, prompt: Prompt, links: Sequence[Worker]) -> Selected[Worker] | None:
        """Return the worker for a request; None: the request waits for its segments, which workers prepare."""
        candidates = [link.candidate(prompt) for link in links]
        if request.prefilled is not None and len(request.sent) == 1:  # it is handed over now
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
        """Return the worker for a request; None: the request waits for its segments, which workers prepare."""
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
        """Return the worker for a request, and note in the request whether that worker only prefills."""
        if request.prefilled is not None and request.follower is not None:
            names = [one.name for one in candidates]
            if request.follower.name in names:
                request.prefills = False
                return names.index(request.follower.name)  # it has read the prefix
        alone = None if request.sent or not may_be_apart(request.generation) else prefiller(prompt, candidates)
        request.prefills = alone is not None
        if alone is not None:
            self._counts["prefilled_apart"] += 1
            return alone
        serving = decoders(candidates)
        return serving[self.choice.choose(prompt, [candidates[i] for i in serving])]

    def keeper(self, request: Routed, answer: Prompt, decoded: str, links: Sequence[Worker]) -> Worker | None:
        """Return the worker to prefill a finished answer that was handed over; None: neither accepts requests.

        `decoded`: the name of the worker that has decoded it.
        """
        assert request.prefilled is not None, "others cache their answers themselves"
        both = [link for link in links if link.name in (request.prefilled.name, decoded)]
        at = keeper(answer, [link.candidate(answer) for link in both], decoded)
        if at is None:
            return None
        self._counts["answers_apart"] += both[at].name != decoded
        return both[at]

    # -- notes to the rule

    def begun(self, request: Routed) -> None:
        """Note that a request's worker has sent its first token."""
        if request.link is not None and request.outstanding is not None:
            request.link.outstanding.begin(request.outstanding)
            if not request.prefills:  # else the rule has not chosen it
                self.choice.begun(request.outstanding.prompt, request.link.name)

    def forget(self, request: Routed) -> None:
        """Note that a request has left its worker."""
        if request.link is not None and request.outstanding is not None:
            request.link.outstanding.remove(request.outstanding)
            if not request.prefills:
                self.choice.ended(request.outstanding.prompt, request.link.name)
        request.outstanding = None
