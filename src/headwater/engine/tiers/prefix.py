"""Prefixes as parts of tiers: states, runs of KV below them, tails after them, MTP entries, and their lookup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import torch

from headwater.account import TierOutcome
from headwater.engine.mtp import MtpRunner
from headwater.engine.runner import Runner
from headwater.engine.tiers.tier import NamedPart, Tier
from headwater.plan import CacheLayout, Held, Tail
from headwater.schedule.tier_load import Load, Offer, Source, TailPlace
from headwater.tiers.names import ENTRIES, RUN, STATE, TAIL, Names, entries_name, run_name, runs_of, state_name
from headwater.tiers.part import Part, PartPlace, Prefix
from headwater.tiers.store import StoreError

RUN_TOKENS = 1024  # of a run of KV, if pages are shorter
MAX_TAIL_STATES = 4  # of a prompt, the deepest ones, after which tails are looked up


class PageEntries:
    """Entries of an MTP head for pages of the arena; none here, since the server does not draft with a head."""

    page_bytes = 0  # of one page's entries

    def complete(self, pages: Sequence[int]) -> bool:
        """Return whether all entries of these pages exist, so that they may be stored."""
        return False

    def views(self, pages: Sequence[int]) -> list[memoryview]:
        """Return the memory of pages' entries, to be read or filled."""
        return []

    def loaded(self, pages: Sequence[int], is_whole: bool) -> None:
        """Record that pages were filled with KV, and with their entries if `is_whole`; else clear the entries."""


class HeadEntries(PageEntries):
    """Entries of a head: its keys and values of a page, and the model's hidden state of the page's last token."""

    def __init__(self, head: MtpRunner) -> None:
        self._head = head
        self._parts: list[np.ndarray[tuple[int, int], np.dtype[np.uint8]]] = [
            head.arena.pages.numpy(),
            head.last_PC.view(torch.uint8).numpy(),
        ]
        self.page_bytes = sum(part.shape[1] for part in self._parts)

    def complete(self, pages: Sequence[int]) -> bool:
        return self._head.complete(pages)

    def views(self, pages: Sequence[int]) -> list[memoryview]:
        return [memoryview(part[page]) for page in pages for part in self._parts]

    def loaded(self, pages: Sequence[int], is_whole: bool) -> None:
        if is_whole:
            self._head.complete_P[list(pages)] = True
        else:
            self._head.clear(pages)


def page_entries(head: MtpRunner | None) -> PageEntries:
    """Return the entries of a head for pages of the arena, if there is a head."""
    return PageEntries() if head is None else HeadEntries(head)


class PrefixParts:
    """Reads parts into pages, and lays out pages as parts. Called from several threads: no page has two of them."""

    def __init__(
        self, names: Names, layout: CacheLayout, runner: Runner, prefill_seconds: Callable[[int], float | None]
    ) -> None:
        self._names, self._layout, self._prefill_seconds = names, layout, prefill_seconds
        self._pages = runner.arena.bytes
        self._entries = page_entries(runner.mtp)
        self.run_tokens = max(layout.page_size, RUN_TOKENS // layout.page_size * layout.page_size)

    def source_bytes(self, source: Source) -> int:
        """Return the bytes of a part that is to be read."""
        if source.kind == TAIL:
            return self.tail_bytes(source.end - source.start)
        return self.bytes_of(source.kind == STATE, source.end - source.start if source.kind == RUN else 0)

    def tail_bytes(self, tokens: int) -> int:
        """Return the bytes of a tail, with its entries."""
        n_kv = self._layout.kv_pages_per_unit
        rows = self._layout.tail_pages[tokens] * self._pages.page_bytes
        return n_kv * (self._pages.page_bytes + self._entries.page_bytes) + rows

    def bytes_of(self, state: bool, tokens: int) -> int:
        """Return the bytes of a state, if `state`, and of the KV of `tokens` tokens, with its entries."""
        layout, of_page = self._layout, self._pages.page_bytes
        pages = tokens // layout.page_size * layout.kv_pages_per_unit
        return pages * (of_page + self._entries.page_bytes) + state * layout.checkpoint_pages * of_page

    def read(self, tier: Tier, load: Load, source: Source, digests: Sequence[str]) -> TierOutcome | None:
        """Read one part into its pages (on a reader's thread); return the reason if that fails.

        The pages belong to the load until its commit, so the check covers their final content.
        """
        unit = self._layout.unit_tokens
        start, end = source.start // unit, source.end // unit
        if source.kind == TAIL:
            return self._read_tail(tier, load, digests[start], source)
        name = state_name(digests, end) if source.kind == STATE else run_name(digests, start, end)
        key = load.key[: end * self._layout.unit_bytes]
        if source.kind == STATE:
            of_state = () if self._layout.every_page else load.plan.saves[0].pages
            return self._pages.fill(of_state, lambda views: tier.read(name, STATE, end, key, views))
        had, pages = self._pages_of(load, source)
        before = _thrown_away(had, self._pages.page_bytes)
        failed = self._pages.fill(pages, lambda views: tier.read(name, RUN, end, key, [*before, *views]))
        if failed is None:
            self._read_entries(tier, load, name, end, key, had, pages)
        return failed

    def _read_tail(self, tier: Tier, load: Load, digest: str, source: Source) -> TierOutcome | None:
        """Read the tail of a load (on a reader's thread), after the prefix with this digest."""
        (tail,) = load.plan.tails
        ids = load.key[source.start // self._layout.unit_tokens * self._layout.unit_bytes :]
        name = tier.names.tail(digest, ids, tail.has_hidden)
        pages = (*tail.kv, *tail.rows)
        failed = self._pages.fill(pages, lambda views: tier.read(name, TAIL, tail.end, load.key, views))
        if failed is None:
            self._read_entries(tier, load, name, tail.end, load.key, 0, tail.kv)
        return failed

    def _tail_name(self, digest: str, tail: Tail) -> str:
        return self._names.tail(digest, tail.ids, tail.has_hidden)

    def _read_entries(
        self, tier: Tier, load: Load, of: str, end: int, key: bytes, had: int, pages: Sequence[int]
    ) -> None:
        """Read the entries for the pages of a run or a tail, if a store has them, or clear them (on a reader's thread).

        had: pages of a run before these, which are read for the check only.
        """
        if not self._entries.page_bytes or not pages:
            return
        name, is_there = entries_name(of), load.follows
        try:
            is_there = is_there or tier.store.has([name])[0]
        except StoreError as error:
            tier.failed(error)
        payload = [*_thrown_away(had, self._entries.page_bytes), *self._entries.views(pages)]
        self._entries.loaded(pages, is_there and tier.read(name, ENTRIES, end, key, payload) is None)

    def _pages_of(self, load: Load, source: Source) -> tuple[int, list[int]]:
        """Return how many pages of a run memory has already, and the load's own pages after them."""
        if not self._layout.kv_pages_per_unit:
            return 0, []
        first, end = source.start // self._layout.page_size, source.end // self._layout.page_size
        own_from = min(end, max(first, load.plan.write_from))
        return own_from - first, list(load.plan.table[own_from:end])

    def prefix(self, namespace: str, key: bytes, at: int, held: Held | None) -> Prefix:
        """Return a prefix with its parts; entries are parts for runs and tails whose entries are complete.

        `held`: its pages; None: the prefix is still being computed, and may get entries.
        """
        unit = self._layout.unit_tokens
        end = at // unit
        digests = self._names.digests(namespace, key)
        runs = runs_of(end, self.run_tokens // unit) if self._layout.kv_pages_per_unit else []
        places: list[PartPlace] = []
        for start, stop in runs:
            name = run_name(digests, start, stop)
            places.append(PartPlace(name, RUN, stop, start, digests[start]))
            if self._entries.page_bytes if held is None else self._has_entries(held.table, start, stop):
                places.append(PartPlace(entries_name(name), ENTRIES, stop, start))
        if end:
            places.append(PartPlace(state_name(digests, end), STATE, end))
        for tail in () if held is None else held.tails:
            name = self._tail_name(digests[end], tail)
            place = PartPlace(name, TAIL, tail.end, tail.start, digests[end], of_tail=True)
            places.append(place)
            if self._entries.page_bytes and self._entries.complete(tail.kv):
                places.append(replace(place, name=entries_name(name), kind=ENTRIES))
        return Prefix(namespace, key, at, places)

    def part(self, prefix: Prefix, number: int, held: Held) -> Part | None:
        """Return a part of a prefix whose pages are held; None for entries or a tail that no longer exist."""
        place, per_unit = prefix.places[number], self._layout.unit_pages
        if place.of_tail:
            return self._part_of_tail(prefix, place, held)
        key = prefix.key[: place.end * self._layout.unit_bytes]
        if place.kind == STATE:
            seconds = self._prefill_seconds(prefix.at - held.after) or 0.0
            after = held.after // self._layout.unit_tokens
            return Part(STATE, after, place.end, key, self._pages.views(held.state), seconds)
        pages = held.table[place.start * per_unit : place.end * per_unit]
        if place.kind == RUN:
            return Part(RUN, place.start, place.end, key, self._pages.views(pages), below=place.below)
        complete = self._entries.complete(pages)
        return Part(ENTRIES, place.start, place.end, key, self._entries.views(pages)) if complete else None

    def _part_of_tail(self, prefix: Prefix, place: PartPlace, held: Held) -> Part | None:
        """Return a tail that is held, or its entries."""
        names = {self._tail_name(place.below, tail): tail for tail in held.tails}
        tail = names.get(TAIL + place.name[1:])
        if tail is None or (place.kind == ENTRIES and not self._entries.complete(tail.kv)):
            return None
        key = prefix.key[: tail.start // self._layout.unit_tokens * self._layout.unit_bytes] + tail.ids
        if place.kind == ENTRIES:
            return Part(ENTRIES, tail.start, tail.end, key, self._entries.views(tail.kv))
        seconds = self._prefill_seconds(tail.end - tail.start) or 0.0
        below = place.below if tail.start else ""  # the shortest prompts have no state
        return Part(TAIL, tail.start, tail.end, key, self._pages.views((*tail.kv, *tail.rows)), seconds, below)

    def _has_entries(self, table: Sequence[int], start: int, end: int) -> bool:
        per_unit = self._layout.unit_pages
        return self._entries.complete(table[start * per_unit : end * per_unit])

    def parts(self, namespace: str, key: bytes, at: int, held: Held) -> list[NamedPart]:
        """Return the parts of a prefix whose pages are held, by their names."""
        prefix = self.prefix(namespace, key, at, held)
        return [(place.name, partial(self._made, prefix, number, held)) for number, place in enumerate(prefix.places)]

    def _made(self, prefix: Prefix, number: int, held: Held) -> Part:
        part = self.part(prefix, number, held)
        assert part is not None, "pages that are held keep their entries"
        return part


def _thrown_away(pages: int, page_bytes: int) -> list[memoryview]:
    """Return memory for pages whose content is read for the check only."""
    return [memoryview(bytearray(page_bytes)) for _ in range(pages)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to look up. Positions in tokens."""

    request: int
    peers: tuple[bytes, ...]
    namespace: str
    key: bytes
    resumed: int  # position at which memory resumes
    last: int  # the last page boundary at which the request can resume
    with_tails: bool = False  # whether tails are looked up


class Lookup:
    """Names of the parts that a prompt could use, and which of them a store has. Positions in names are units."""

    def __init__(self, layout: CacheLayout, run_tokens: int) -> None:
        self._layout, self._unit, self._run_units = layout, layout.unit_tokens, run_tokens // layout.unit_tokens

    def offer(self, tier: Tier, prompt: Prompt) -> Offer:
        """Return the states and runs of a prompt in a tier, or that only another fingerprint has states there."""
        ends = range(prompt.resumed // self._unit + 1, prompt.last // self._unit + 1)
        offer = Offer(tier.number)
        if tier.usable:  # it may have failed while the prompt waited for its lookup
            digests = tier.names.digests(prompt.namespace, prompt.key)
            offer = self._stored(tier, digests, ends)
            if prompt.with_tails and tier.usable:
                deepest = sorted({prompt.resumed, *offer.states})[-MAX_TAIL_STATES:]
                offer = replace(offer, tails=frozenset(self._tails(tier, digests, prompt.key, deepest)))
        if not offer.states and self._has_other_states(tier, prompt, ends):
            offer = replace(offer, other_fingerprint=True)
        return offer

    def _tails(self, tier: Tier, digests: Sequence[str], key: bytes, after: Sequence[int]) -> list[TailPlace]:
        """Return the tails after these positions of which a prompt has all tokens."""
        unit_bytes, places, names = self._layout.unit_bytes, list[TailPlace](), list[str]()
        token_bytes = unit_bytes // self._unit
        for at in after:
            ids = key[at // self._unit * unit_bytes :][:unit_bytes]
            for n, has_hidden in product(range(1, len(ids) // token_bytes + 1), (False, True)):
                places.append(TailPlace(at, at + n, has_hidden))
                names.append(tier.names.tail(digests[at // self._unit], ids[: n * token_bytes], has_hidden))
        try:
            found = tier.store.has(names)
        except StoreError as error:
            tier.failed(error)
            return []
        return [place for place, stored in zip(places, found, strict=True) if stored]

    def _has_other_states(self, tier: Tier, prompt: Prompt, ends: range) -> bool:
        """Return whether a tier has states of a prompt under another fingerprint."""
        for names in tier.fingerprints.others:
            if tier.usable and self._stored(tier, names.digests(prompt.namespace, prompt.key), ends).states:
                return True
        return False

    def _stored(self, tier: Tier, digests: Sequence[str], ends: range) -> Offer:
        """Return the states at these units, and the runs of KV: whole ones, and the last one below each state."""
        unit, length = self._unit, self._run_units
        whole = [run for run in runs_of(ends.stop - 1, length) if run[1] - run[0] == length]
        try:
            names = [state_name(digests, end) for end in ends] + [run_name(digests, *run) for run in whole]
            found = tier.store.has(names)
            states = [end for end, stored in zip(ends, found, strict=False) if stored]
            runs = [run for run, stored in zip(whole, found[len(ends) :], strict=True) if stored]
            ragged = [runs_of(end, length)[-1] for end in states if end % length]
            found = tier.store.has([run_name(digests, *run) for run in ragged])
            runs += [run for run, stored in zip(ragged, found, strict=True) if stored]
        except StoreError as error:
            tier.failed(error)
            return Offer(tier.number)
        positions = frozenset(end * unit for end in states)
        return Offer(tier.number, positions, frozenset((start * unit, end * unit) for start, end in runs))
