"""A model with memory, which makes segments and runs requests that are composed of them, without the engine."""

from dataclasses import dataclass

import torch

from headwater.memory.slots import Segment, StateMemory
from headwater.mixers.batch import StepBatch
from headwater.mixers.slices import Slice
from headwater.mixers.window import Rings
from headwater.models.hybrid import HybridModel
from tests.support import Bench, Sequence

HEAD, TAIL = 8, 8  # tokens of a segment that are computed at each use


@dataclass(frozen=True)
class Stored:
    """A segment in pages of the arena."""

    tokens: list[int]
    table: torch.Tensor  # of its KV
    segment: Segment

    @property
    def end(self) -> int:
        """Position at which the segment's tail begins."""
        return len(self.tokens) - TAIL


class SegmentRig(Bench):
    """Model with pages that hold NaN until they are written."""

    def __init__(self, model: HybridModel) -> None:
        super().__init__(model, poison=True)
        spec = model.spec
        in_pages = spec.states_in_pages
        self.state_pages, self.transition_pages = (
            1 if in_pages else max(1, pages) for pages in (spec.checkpoint_pages, spec.transition_pages)
        )
        row_bytes, area = spec.transition_place
        self.transitions = StateMemory(spec.transition, 1, row_bytes or spec.page_bytes, area=area)

    def make(self, tokens: list[int]) -> Stored:
        """Compute a segment as a sequence of its own, and store it."""
        model, sequence, head_row = self.model, self.sequence(len(tokens)), self._slots[-1]
        slot, table, end = sequence.slot, sequence.table, len(tokens) - TAIL
        model.identities(self.transitions, 0)
        slices = (
            Slice(0, HEAD, 0, slot, table, 0, saves=((HEAD, head_row),)),
            Slice(HEAD, end - HEAD, HEAD, slot, table, 0, transition=0),
        )
        self.run(tokens[:end], slices)
        model.zero_start(self.states, head_row, slot, self.transitions, 0)
        state_pages = self.taken(self.state_pages)
        transition_pages = self.taken(self.transition_pages)
        self.states.save(slot, self.arena.pages, state_pages)
        self.transitions.save(0, self.arena.pages, transition_pages)
        made = Segment.gathered(model.spec, self.arena.pages, range(HEAD, end), state_pages, transition_pages)
        return Stored(tokens, table, made)

    def compose(self, parts: list[list[int] | Stored], split: bool = False) -> tuple[Sequence, dict[int, torch.Tensor]]:
        """A request of plain tokens and segments, and the logits of what it computes, by position.

        It is one step, or several: one for each run of tokens.
        """
        tokens = [token for part in parts for token in (part.tokens if isinstance(part, Stored) else part)]
        sequence, segments = self.sequence(len(tokens) + 8), [part for part in parts if isinstance(part, Stored)]
        slices: list[Slice] = []
        at = first = rows = 0
        composes: tuple[tuple[int, int], ...] = ()
        for part in parts:
            if isinstance(part, Stored):
                self.model.place(self.arena, part.table, sequence.table, HEAD, part.end, at)
                length = at + HEAD - first
                slices.append(Slice(rows, length, first, sequence.slot, sequence.table, 0, composes=composes))
                rows += length
                composes, first = ((segments.index(part), at),), at + part.end
            at += len(part.tokens) if isinstance(part, Stored) else len(part)
        slices.append(Slice(rows, at - first, first, sequence.slot, sequence.table, 0, composes=composes))
        sequence.length = at
        stored = [part.segment for part in segments]
        if split:
            slices = [Slice(**{**vars(s), "first": 0}) for s in slices]
            logits = [self.run(tokens[s.start : s.end], (s,), stored) for s in slices]
        else:
            logits = [self.run([t for s in slices for t in tokens[s.start : s.end]], tuple(slices), stored)]
        positions = [p for s in slices for p in range(s.start, s.end)]
        return sequence, dict(zip(positions, torch.cat(logits), strict=True))

    def run(self, tokens: list[int], slices: tuple[Slice, ...], segments: list[Segment] = ()) -> torch.Tensor:
        """Logits of every row of one step."""
        none = torch.empty(0, dtype=torch.int64)
        position_N = torch.cat([torch.arange(s.start, s.end) for s in slices])
        batch = StepBatch(torch.tensor(tokens), position_N, slices, none, (), torch.arange(len(tokens)))
        return self.model.forward(batch, self.arena, self.states, segments, self.transitions)

    def taken(self, n: int) -> list[int]:
        """Free pages."""
        pages, self._free = self._free[:n], self._free[n:]
        assert len(pages) == n, f"{n} pages wanted, {len(pages)} left"
        return pages

    def state(self, sequence: Sequence, layer: int, name: str = "recurrent") -> torch.Tensor:
        return self.states.view(layer, name)[sequence.slot]

    def kept(self, sequence: Sequence, layer: int) -> torch.Tensor:
        """KV of all its tokens, or of those in the layer's window, in order."""
        if layer in self.model.mixers.windows:
            window = self.model.mixers.windows[layer].shape.window
            rings = (Rings(self.states.view(layer, name)) for name in ("keys", "values"))
            first = max(0, sequence.length - window)
            return torch.cat([r.read(sequence.slot, first, sequence.length).flatten(1) for r in rings], dim=1)
        return torch.cat(self.arena.read(layer, sequence.table, 0, sequence.length), dim=1)
