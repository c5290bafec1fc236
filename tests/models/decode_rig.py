"""Decode steps of the same sequences by a model that runs them and by one that replays recorded ones."""

from collections.abc import Callable

import torch

from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.models.decode_graphs import DecodeGraphs, Recorder
from headwater.models.hybrid import HybridModel
from tests.support import Bench


class Replaying:
    """A model whose decode steps are replayed, over the memory of a bench."""

    def __init__(self, model: HybridModel, recorder_of: Callable[[Arena, StateMemory], Recorder]) -> None:
        self.spec, self.model, self.recorder_of = model.spec, model, recorder_of
        self.graphs: DecodeGraphs | None = None

    def forward(self, batch, arena, states) -> torch.Tensor:
        if batch.slices:
            return self.model.forward(batch, arena, states)
        if self.graphs is None:
            self.graphs = DecodeGraphs(self.model, arena, states, self.recorder_of(arena, states))
        return self.graphs.forward(batch)


def prefilled(model: HybridModel | Replaying, lengths: tuple[int, ...], like: Bench | None = None) -> Bench:
    """A bench with one sequence of each length, `bench.seqs`; with the memory of another one after the same prompts."""
    bench = Bench(model, poison=True)
    bench.seqs = [bench.sequence(length + 80) for length in lengths]
    for i, (seq, length) in enumerate(zip(bench.seqs, lengths, strict=True)):
        if like is None:
            bench.step([(seq, list(range(300 + i, 300 + i + length)))])
        seq.length = length
    if like is not None:
        bench.arena.pages.copy_(like.arena.pages)
        bench.states.bytes_RB.copy_(like.states.bytes_RB)
    return bench


Counts = tuple[int, ...]  # of each sequence


def decode(bench: Bench, who: list[int], token: int, drafted: Counts = (), accepted: Counts = ()) -> torch.Tensor:
    rows = [(bench.seqs[i], token + i + 7 * number) for number, i in enumerate(who)]
    return bench.step([], rows, drafted=drafted, accepted=accepted)


class Pair:
    """Two benches with the same sequences, an eager one and one that replays; each step asserts equal bits."""

    def __init__(
        self, model: HybridModel, lengths: tuple[int, ...], recorder_of: Callable[[Arena, StateMemory], Recorder]
    ) -> None:
        self.eager = prefilled(model, lengths)
        self.replayed = prefilled(Replaying(model, recorder_of), lengths, self.eager)
        self.steps = 0

    @property
    def graphs(self) -> DecodeGraphs:
        return self.replayed.model.graphs

    def decode(self, who: list[int], drafted: Counts = (), accepted: Counts = ()) -> None:
        """Decode a token of some sequences in both, several of one named in a row; compare logits, states, pages."""
        one, other = self.eager, self.replayed
        assert torch.equal(*(decode(bench, who, 400 + self.steps, drafted, accepted) for bench in (one, other)))
        assert torch.equal(one.states.bytes_RB, other.states.bytes_RB)
        assert torch.equal(one.arena.pages, other.arena.pages)
        self.steps += 1
