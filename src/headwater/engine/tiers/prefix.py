"""Prefixes as parts of tiers: states, the runs of KV below them, entries of the MTP head, and their lookup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from headwater.account import TierOutcome
from headwater.engine.mtp import MtpRunner
from headwater.engine.runner import Runner
from headwater.engine.tiers.tier import NamedPart, Tier
from headwater.plan import CacheLayout, Held
from headwater.schedule.tier_load import Load, Offer, Source
from headwater.tiers.names import ENTRIES, RUN, STATE, Names, entries_name, run_name, runs_of, state_name
from headwater.tiers.part import Part, PartPlace, Prefix
from headwater.tiers.store import StoreError

RUN_TOKENS = 1024  # of a run of KV, if pages are shorter


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

    def bytes_of(self, state: bool, tokens: int) -> int:
        """Return the bytes of a state, if `state`, and of the KV of `tokens` tokens, with its entries."""
        layout, of_page = self._layout, self._pages.page_bytes
        pages = tokens // layout.page_size * layout.kv_pages_per_unit
        return pages * (of_page + self._entries.page_bytes) + state * layout.checkpoint_pages * of_page

    def read(self, tier: Tier, load: Load, source: Source, digests: Sequence[str]) -> TierOutcome | None:
        """Read one part into its pages (on a reader's thread); return the reason if that fails.

        The pages belong to the load until its commit, so the check covers their final content.
        """
        unit, is_state = self._layout.unit_tokens, source is load.state
        start, end = source.start // unit, source.end // unit
        name = state_name(digests, end) if is_state else run_name(digests, start, end)
        key = load.key[: end * self._layout.unit_bytes]
        if is_state:
            of_state = load.plan.saves[0].pages if load.plan.saves else ()
            return self._pages.fill(of_state, lambda views: tier.read(name, STATE, end, key, views))
        had, pages = self._pages_of(load, source)
        before = _thrown_away(had, self._pages.page_bytes)
        failed = self._pages.fill(pages, lambda views: tier.read(name, RUN, end, key, [*before, *views]))
        if failed is None and self._entries.page_bytes:
            self._entries.loaded(pages, self._read_entries(tier, load, name, end, had, pages))
        return failed

    def _read_entries(self, tier: Tier, load: Load, run: str, end: int, had: int, pages: Sequence[int]) -> bool:
        """Read the entries for the pages of a run, if a store has them (on a reader's thread).

        False: they must be cleared.
        """
        name, key = entries_name(run), load.key[: end * self._layout.unit_bytes]
        try:
            if not load.follows and not tier.store.has([name])[0]:
                return False
        except StoreError as error:
            tier.failed(error)
            return False
        payload = [*_thrown_away(had, self._entries.page_bytes), *self._entries.views(pages)]
        return tier.read(name, ENTRIES, end, key, payload) is None

    def _pages_of(self, load: Load, source: Source) -> tuple[int, list[int]]:
        """Return how many pages of a run memory has already, and the load's own pages after them."""
        if not self._layout.kv_pages_per_unit:
            return 0, []
        first, end = source.start // self._layout.page_size, source.end // self._layout.page_size
        own_from = min(end, max(first, load.plan.write_from))
        return own_from - first, list(load.plan.table[own_from:end])

    def prefix(self, namespace: str, key: bytes, at: int, held: Held | None) -> Prefix:
        """Return a prefix with its parts; entries are parts for runs whose entries are complete.

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
        places.append(PartPlace(state_name(digests, end), STATE, end))
        return Prefix(namespace, key, at, places)

    def part(self, prefix: Prefix, number: int, held: Held) -> Part | None:
        """Return a part of a prefix whose pages are held; None for entries that no longer exist."""
        place, per_unit = prefix.places[number], self._layout.unit_pages
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
    last: int  # the last position at which the request can resume


class Lookup:
    """Names of the parts that a prompt could use, and which of them a store has. Positions in names are units."""

    def __init__(self, unit_tokens: int, run_tokens: int) -> None:
        self._unit, self._run_units = unit_tokens, run_tokens // unit_tokens

    def offer(self, tier: Tier, prompt: Prompt) -> Offer:
        """Return the states and runs of a prompt in a tier, or that only another fingerprint has states there."""
        ends = range(prompt.resumed // self._unit + 1, prompt.last // self._unit + 1)
        offer = Offer(tier.number)
        if tier.usable:  # it may have failed while the prompt waited for its lookup
            offer = self._stored(tier, tier.names.digests(prompt.namespace, prompt.key), ends)
        if not offer.states and self._has_other_states(tier, prompt, ends):
            offer = replace(offer, other_fingerprint=True)
        return offer

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
