"""A request in a router: its worker, and the events that its client has received."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from headwater.account import CacheAccount
from headwater.cache.segments.compose import composed_key
from headwater.cluster.cost import OpenRequests, Outstanding, Prompt
from headwater.cluster.disaggregation import Prefilled, decode_of, kept, prefill_of
from headwater.cluster.messages import TOKEN_BYTES, Digests
from headwater.cluster.wire import Cancel, KeepAnswer, Prepare, Submit
from headwater.errors import HeadwaterError
from headwater.events import Event, FinishedEvent, TokenEvent
from headwater.request import Generation
from headwater.schedule.sequence import key_of
from headwater.tiers.store import PEER


class Holder(Protocol):
    """Worker that prepares segments and holds requests, real or simulated."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> bytes | None: ...

    @property
    def outstanding(self) -> OpenRequests: ...

    def has_segment(self, digest: int) -> bool:
        """Return whether the worker has a segment in memory."""

    def stores_of(self, digest: int) -> Sequence[str]:
        """Return the media of the worker's own stores that have a segment."""

    def send(self, message: Prepare | Cancel) -> None:
        """Send an order, or cancel it; `Preparing.prepared` is called later with its end."""


class Answering(Holder, Protocol):
    """Worker that answers requests."""

    @property
    def open(self) -> dict[int, Routed]:
        """Requests that it has, by id."""


class Convolving(Protocol):
    """Model, as segments need it."""

    @property
    def conv_taps(self) -> int: ...


@dataclass(eq=False)
class Routed:
    """A request, until its answer is complete."""

    id: int
    generation: Generation
    on_event: Callable[[Event], None]
    began: float  # seconds of a monotonic clock
    key: bytes  # of its prompt
    blocks: Sequence[int] = ()  # digests of its prompt's units
    composed_blocks: Sequence[int] = ()  # likewise, if it is composed of its segments
    attempt: int = 0
    sent: list[TokenEvent] = field(default_factory=list)
    scored: bool = False  # the prompt's log probabilities were sent
    again: TokenEvent | None = None  # the last sent token, which a new worker sends again first
    link: Answering | None = None  # the worker that answers
    outstanding: Outstanding | None = None  # as that worker was chosen for it
    peers: tuple[bytes, ...] = ()  # incarnations of workers that have more of its prompt than that worker
    predicted: int = 0  # leading tokens that it was expected to have
    loads: bool = False  # it is expected to load more of them from a store of its own
    unassigned_since: float | None = None  # since when no worker takes it
    fingerprint: str | None = None  # of workers that can continue it; None: any
    prefills: bool = False  # its worker only prefills, for another one
    prefilled: Prefilled | None = None  # by a worker that only did that
    prefiller: bytes = b""  # incarnation of that worker
    follower: Holder | None = None  # the worker that reads what that one computes, and continues
    combiner: object = None  # the link of the worker that has its segments, once they are prepared
    composed: int = 0  # tokens of these segments
    loads_segments: bool = False  # its worker is expected to load some of them from a store of its own
    built: dict[int, int] = field(default_factory=dict)  # segments that were built ahead for it: digest, interior
    built_apart: set[int] = field(default_factory=set)  # those that not the combining worker built

    def prompt(self, key: bytes, unit_bytes: int, model: Convolving) -> Prompt:
        """Return its prompt with digests of units under a secret key, which are computed once; 0: of none.

        A prompt that is scored has none: nothing of it is reused.
        """
        generation = self.generation
        if not unit_bytes or generation.params.prompt_logprobs is not None:
            return Prompt(len(generation.prompt))
        if not self.blocks:
            digests, namespace = Digests(key, unit_bytes), generation.namespace
            self.blocks = digests.prefix(namespace, self.key)
            if generation.segments:
                composed = composed_key(self.key, generation.segments, generation.fidelity, model.conv_taps)
                self.composed_blocks = [] if composed is None else digests.prefix(namespace, composed)
        return Prompt(len(generation.prompt), self.blocks, unit_bytes // TOKEN_BYTES, composed=self.composed_blocks)

    def submission(self, now: float) -> Submit:
        """Return the message for the worker that continues the request at `now`, with the rest of its deadline."""
        output = tuple(event.token for event in self.sent[:-1])
        generation = prefill_of(self.generation) if self.prefills else self.generation
        if self.prefilled is not None:
            generation = decode_of(generation)
        if generation.deadline is not None:
            generation = replace(generation, deadline=max(0.001, generation.deadline - (now - self.began)))
        peers = self.peers
        if self.prefiller:  # it has the tail of the prompt, which no event announces
            peers = (self.prefiller, *(one for one in peers if one != self.prefiller))
        return Submit(self.id, self.attempt, replace(generation, prompt=()), self.key, output, peers, bool(self.sent))

    def kept(self, prompt: Prompt, end: FinishedEvent) -> tuple[Prompt, KeepAnswer] | None:
        """Return prompt and answer, which are to be cached, and the order to do so; None if they are not.

        A token that ends an answer is only in its last event.
        """
        tokens = [event.token for event in self.sent]
        if isinstance(end.stop, int) and end.output_tokens > len(tokens):
            tokens.append(end.stop)
        answer = kept(prompt, prompt.tokens + len(tokens)) if self.generation.keep_output else None
        if answer is None:
            return None
        order = KeepAnswer(self.id, self.attempt, replace(self.generation, prompt=()), self.key + key_of(tokens))
        return answer, order

    def difference(self, event: TokenEvent, again: TokenEvent) -> HeadwaterError | None:
        """Return the error if a worker has sent `event` instead of `again`, the token that was sent before."""
        if (event.token, event.logprob, event.top) == (again.token, again.logprob, again.top):
            return None
        return HeadwaterError(
            f"another worker continued the answer with token {event.token} instead of {again.token} at "
            f"{len(self.sent):,}: their bits differ, although their fingerprints are equal"
        )

    def count_reads(self, account: CacheAccount, counts: Counter[str]) -> None:
        """Count pulls and loads of its worker, and an expected load that did not happen."""
        read = set(filter(None, (account.loaded_from or "").split(",")))
        counts["pulled"] += PEER in read
        counts["loaded"] += bool(read - {PEER})
        counts["missed_loads"] += self.loads and not read - {PEER}

    def count_prediction(self, end: FinishedEvent, block_tokens: int, counts: Counter[str]) -> None:
        """Count whether its worker had as many tokens as predicted, and changes until the request began.

        Events announce no tails: a request may resume up to a block after the checkpoint that was there on arrival.
        """
        reused, had = in_memory(end.account), end.cached_on_arrival
        if had is None:
            had = reused
        elif not had <= reused <= had + block_tokens:
            counts["lost_waiting" if reused < had else "gained_waiting"] += 1
        found = "as_predicted" if had == self.predicted else "less" if had < self.predicted else "more"
        counts[f"cached_{found}"] += 1

    def account_of(self, account: CacheAccount) -> CacheAccount:
        """Return the account of its answer, in which segments that were built for it are not cached."""
        if not self.built or not account.segments:
            return account
        cold = min(sum(self.built.values()), account.composed_tokens - account.cold_tokens)
        return replace(
            account,
            cached_tokens=account.cached_tokens - cold,
            cold_tokens=account.cold_tokens + cold,
            segments_apart=len(self.built_apart),
        )


def in_memory(account: CacheAccount) -> int:
    """Return the position at which a request resumed, without the tokens that were read for it."""
    return account.resumed_at - (0 if account.loaded_segments else account.loaded_tokens)
