"""Lookup of a prompt in one tier: positions with a state to resume from, and runs of KV below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headwater.engine.tiers.tier import Tier
from headwater.schedule.tier_load import Offer
from headwater.tiers.names import run_name, runs_of, state_name
from headwater.tiers.store import StoreError


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
