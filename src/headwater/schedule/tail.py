"""The tail of a prompt: what a worker that decodes needs from the one that prefilled, beside pages of the cache.

These are the KV after the last page at which a request can resume, the states after the prompt's last token, and the
first token of the answer. No later prompt resumes at that position, so the tail is in no index: the worker that
prefilled keeps it in pages of its own until the other one has read it, and that one copies it into the request's slot.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, field, replace

from headwater.cache.prefix_cache import PrefixCache
from headwater.errors import OutOfPages
from headwater.events import TokenLogprob
from headwater.plan import Copied, Draft, Plan, Sharing


@dataclass(frozen=True, slots=True)
class TailPlace:
    """Number of a tail, and the worker that keeps it."""

    id: bytes
    peer: bytes = b""  # its incarnation; empty: this worker, which is to keep it


@dataclass(frozen=True, slots=True)
class Handover:
    """Work of other workers of a cluster on a request."""

    output: tuple[int, ...] = ()  # tokens of the answer so far, after which it continues with the same bits
    peers: tuple[bytes, ...] = ()  # incarnations of workers that have more of the prompt cached
    follows: int | None = None  # number of the prompt's prefill that is followed
    tail: TailPlace | None = None  # of the prompt's tail, which is to be kept for another worker, or read
    begun: bool = False  # the client has tokens of the answer from another worker


NO_HANDOVER = Handover()


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of an answer with its log probabilities, and the seed that it was drawn with."""

    token: int
    logprob: float | None
    top: tuple[TokenLogprob, ...]
    seed: int | None

    def as_json(self) -> bytes:
        return json.dumps(astuple(self)).encode()

    @classmethod
    def read(cls, data: bytes) -> FirstToken:
        """Return what `as_json` wrote. Raises ValueError or TypeError for all else."""
        token, logprob, top, seed = json.loads(data)
        return cls(token, logprob, tuple(TokenLogprob(*one) for one in top), seed)


@dataclass(eq=False, slots=True)
class Tail:
    """Pages that hold the tail of a prompt, or are reserved for it. Guarded by the scheduler's lock."""

    cache: PrefixCache
    plan: Plan
    start: int  # tokens before it: a multiple of the grid
    end: int  # tokens of the prompt
    first: FirstToken | None = None  # None: the tail is not read yet
    is_taken: bool = field(default=False, kw_only=True)  # a leg copies it
    is_given_up: bool = field(default=False, kw_only=True)  # it is released once it is read
    is_released: bool = field(default=False, kw_only=True)

    @classmethod
    def reserved(cls, cache: PrefixCache, id: int, namespace: str, prompt_tokens: int) -> Tail | None:
        """Take pages for the tail of a prompt, evicting if need be; None if there is no memory.

        They are those of a sequence of as many tokens as the tail has: its KV, and the pages that back a slot.
        """
        unit = cache.layout.unit_tokens
        start = (prompt_tokens - 1) // unit * unit
        try:
            plan = cache.reserve(
                Draft(id, namespace, b"", 0, prompt_tokens - start, slot=True, sharing=Sharing(reuse=False))
            )
        except OutOfPages:
            return None
        return cls(cache, plan, start, prompt_tokens)

    @property
    def pages(self) -> Copied:
        return Copied(tuple(self.plan.table), tuple(self.plan.lent))

    def ends_leg(self, start: int, end: int) -> bool:
        """Return whether a leg ends with the tail, and computes nothing before it: then it copies the tail."""
        return self.first is not None and not self.is_released and self.start <= start and end == self.end

    def applied_to(self, plan: Plan) -> Plan:
        """Return the plan of a leg that ends with the tail, which it copies. Nothing else need be in place before."""
        self.is_taken = True
        return replace(plan, copied=self.pages, kept=None)

    def release(self) -> None:
        """Give the pages back."""
        if not self.is_released:
            self.is_released = True
            self.cache.abandon(self.plan)
            self.cache.release(self.plan.request)
