"""A small model that drafts for a larger one with the same tokenizer: it decodes ahead of it, between its steps.

It has a memory and a cache of its own, so a prefix that it has seen is not computed again. A prompt is prefilled some
tokens at a time, and its request has drafts once all of it is there. Drafts are decoded on a copy of the state: a draft
that is rejected leaves nothing. Keys of rejected drafts are overwritten.

S sequences, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch

from headwater.cache.placement import make_placement
from headwater.cache.prefix_cache import PrefixCache
from headwater.draft.drafter import NO_DRAFT, Draft, draft_of
from headwater.engine.draft_passes import PassSeconds, best_of
from headwater.engine.runner import Runner
from headwater.errors import OutOfPages
from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.models.load import LoadedModel
from headwater.request import Generation, SamplingParams
from headwater.schedule.kinds.request import Request
from headwater.schedule.limits import MAX_REPLAYED_ROWS, Budget
from headwater.schedule.planner import Planner
from headwater.schedule.sequence import Phase
from headwater.schedule.sequence import Sequence as AnySequence
from headwater.schedule.step import Decode, Leg, Step
from headwater.setting import SettingError
from headwater.spec import ModelSpec

SHARE = 10  # of the memory, of which the draft model has one part
PREFILLED = 256  # tokens of prompts between two steps of the larger model
SAVES = 4  # checkpoints of a leg


def check_fits(draft: LoadedModel, target: LoadedModel) -> None:
    """Raise SettingError if a model's drafts would be of another tokenizer."""
    if draft.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        sizes = (one.tokenizer.get_vocab_size() for one in (draft, target))
        must = "whose tokenizer is not the model's: other tokens or other numbers for them, {:,} and {:,}".format(
            *sizes
        )
        raise SettingError("draft_model", repr(str(draft.path)), must)


@dataclass(eq=False)
class Shadow:
    """A request as the draft model has it."""

    own: Request
    scratch: int  # slot of its drafts


class DraftModel:
    """Drafts by a second, smaller model. Called only on the engine's thread."""

    def __init__(
        self, loaded: LoadedModel, vocab_size: int, memory: int, requests: int, device: torch.device | str = "cpu"
    ) -> None:
        """Lay out `memory` bytes for `max_running` requests. Raises ConfigError if that is too little.

        `vocab_size` is the larger model's: one of the two may have been filled up further, beyond their tokenizer.
        """
        spec: ModelSpec = loaded.spec
        self.bytes, self._vocab = memory, min(vocab_size, spec.vocab_size)
        layout = spec.layout(memory)
        layout = replace(layout, slot_pages=2 * layout.slot_pages)  # a request's state, and the copy for its drafts
        slots = 2 * requests
        row_bytes, area = spec.state_place
        n_saves = PREFILLED // spec.page_size + 2 * slots if spec.states_in_pages else SAVES
        self.states = StateMemory(spec.state, 2 * slots + n_saves, row_bytes, device, area)
        self.cache = PrefixCache(layout, "lru")
        self.planner = Planner(self.cache, make_placement("structural"))
        self.runner = Runner(loaded.model, Arena(spec, layout.n_pages, device), self.states, slots)
        self.longest, self.page_size = spec.max_length, layout.page_size
        self._seconds = PassSeconds()
        self._free = [(slot, requests + slot) for slot in range(requests)]
        self._shadows: dict[int, Shadow] = {}
        self._next_id = 0

    @property
    def pass_seconds(self) -> float:
        return self._seconds.mean

    def forget(self, request: int) -> None:
        """Give back what a request of the larger model has here."""
        shadow = self._shadows.pop(request, None)
        if shadow is not None:
            assert shadow.own.slot is not None
            self._free.append((shadow.own.slot, shadow.scratch))
            if shadow.own.phase is not Phase.WAITING:  # else it never had pages
                self.cache.release(shadow.own.id)
            self.runner.forget(shadow.own.id)
            self.runner.release({shadow.own.slot, shadow.scratch})

    @torch.inference_mode()
    def guess(self, wanted: Sequence[tuple[AnySequence, int]], least: float) -> list[Draft]:
        """Draft for requests; see `Guesser.guess`."""
        drafts: list[list[int]] = [[] for _ in wanted]
        first, chances, left = [0.0] * len(wanted), [1.0] * len(wanted), PREFILLED
        ready = list[tuple[int, Request]]()  # of a request its number, and its sequence at the last token
        for number, (seq, most) in enumerate(wanted):
            own, left = self._caught_up(seq, most, left)
            if own is not None:
                ready.append((number, own))
        while ready:
            begun, recorded = time.perf_counter(), len(self.runner.graphs or ())
            best = self._decode([own for _, own in ready])
            going = []
            for (number, own), (token, p) in zip(ready, best, strict=True):
                first[number] = first[number] or p
                chances[number] *= p
                drafts[number].append(token)
                if len(drafts[number]) < wanted[number][1] and chances[number] >= least:
                    going.append((number, self._after(own, wanted[number][0].id, token)))
            if len(self.runner.graphs or ()) == recorded:
                self._seconds.note(time.perf_counter() - begun)
            ready = going
        return [draft_of(tokens, p) if tokens else NO_DRAFT for tokens, p in zip(drafts, first, strict=True)]

    # -- a request's tokens -------------------------------------------------------

    def _caught_up(self, seq: AnySequence, most: int, budget: int) -> tuple[Request | None, int]:
        """Let the model have a request's tokens, all but some of the last, if the budget of prompts suffices.

        Returns its sequence, with pages for as many drafts, or None, and the rest of the budget.
        """
        if len(seq.tokens) + most > self.longest or max(seq.tokens) >= self._vocab:
            return None, budget
        shadow = self._shadows.get(seq.id) or self._begin(seq)
        if shadow is None:
            return None, budget
        own = shadow.own
        try:
            while own.computed < own.n_prompt:
                computed = self._prefill(own, budget)
                if not computed:
                    return None, budget
                budget -= computed
            own.tokens = list(seq.tokens)
            self.planner.extend(own, len(own.tokens) + most)
        except OutOfPages:
            return None, budget
        while own.uncomputed > MAX_REPLAYED_ROWS:  # after drafts of another drafter, or a pause
            self._decode([own], MAX_REPLAYED_ROWS)
        return own, budget

    def _begin(self, seq: AnySequence) -> Shadow | None:
        if not self._free:
            return None
        slot, scratch = self._free.pop()
        self._next_id += 1
        own = Request(self._next_id, Generation(seq.generation.prompt, SamplingParams(), seq.namespace))
        own.slot = slot
        shadow = self._shadows[seq.id] = Shadow(own, scratch)
        return shadow

    def _prefill(self, own: Request, budget: int) -> int:
        """Compute the next leg of a prompt; returns its tokens, 0 if the budget is too small. Raises OutOfPages."""
        begins = own.phase is Phase.WAITING
        limits = Budget(budget, SAVES)
        plan = self.planner.first_leg(own, limits, ()) if begins else own.next_leg(self.planner, limits)
        if plan is None:
            return 0
        own.phase, own.table, own.computed = Phase.PREFILL, plan.table, plan.start
        self.runner.run(Step((Leg(own, plan),), ()))
        self.cache.commit(plan)
        own.leg_ended(plan)
        return max(1, plan.computed_tokens)

    # -- passes -------------------------------------------------------------------

    def _decode(self, seqs: list[Request], most: int | None = None) -> list[tuple[int, float]]:
        """Compute the uncomputed tokens of sequences; return the likeliest next token of each, and its probability."""
        found = list[tuple[int, float]]()
        for some in _together(seqs, most):
            logits_SV = self.runner.run(Step((), tuple(some))).cpu()
            for decode in some:
                decode.seq.computed += decode.count
            found += best_of(logits_SV[:, : self._vocab]) if len(logits_SV) else []
        return found

    def _after(self, own: Request, request: int, token: int) -> Request:
        """Return a sequence with a drafted token at its end, on a copy of the state."""
        scratch = self._shadows[request].scratch
        if own.slot == scratch:
            own.tokens.append(token)
            return own
        drafted = copy(own)
        drafted.slot, drafted.tokens = scratch, [*own.tokens, token]
        self.states.bytes_RB[scratch] = self.states.bytes_RB[own.slot]
        return drafted


def _together(seqs: list[Request], most: int | None) -> list[list[Decode]]:
    """Return rows of sequences in steps of at most MAX_REPLAYED_ROWS rows."""
    steps, rows = list[list[Decode]](), MAX_REPLAYED_ROWS
    for seq in seqs:
        count = min(seq.uncomputed, most or MAX_REPLAYED_ROWS)
        if rows + count > MAX_REPLAYED_ROWS:
            steps.append([])
            rows = 0
        steps[-1].append(Decode(seq, count))
        rows += count
    return steps
