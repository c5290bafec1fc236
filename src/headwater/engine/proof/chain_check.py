"""Start-up self-check of steps with several rows of one sequence: known tokens, and drafts.

Each layer that keeps something of a sequence is built in a narrow model, at its own heads and widths, and computes what
a step of the server asks of it. A sequence with as many rows as drafts may give it, across the end of a page, of a ring
or of a split of keys, is computed with two others. Its rows must have the bits of steps of their own and leave what
those leave, with none of its drafts accepted, half of them, or all.

B rows of a step, C model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwater.draft.drafter import MOST_DRAFTS
from headwater.layers.architecture import Architecture, Block, Part
from headwater.layers.attention import WindowAttention
from headwater.layers.layer import Layer
from headwater.layers.lightning import Lightning
from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.mixers import numerics
from headwater.mixers.batch import STATE, StepBatch
from headwater.mixers.numerics import Numerics, same_bits
from headwater.mixers.weights import Weights
from headwater.models.build import layer_classes, layer_function
from headwater.models.hybrid import Step
from headwater.spec import ModelSpec

NARROW = 64  # model width
SEQUENCES = (2 + MOST_DRAFTS, 1, 3)  # rows of each: its next token, drafts, and the token after them
ROWS = [(sequence, number) for sequence, n in enumerate(SEQUENCES) for number in range(n)]
ACCEPTED = (0, MOST_DRAFTS // 2, MOST_DRAFTS)  # drafts of each sequence, at most
LONGEST_RING = 512  # tokens of a window that is checked: longer ones are read in more of the same parts
SPLIT = 256  # keys: attention splits keys at multiples of it, or of a divisor of it
FIRST, BEFORE_END = 5, 3  # position of a sequence's first row, at least; rows before an end

Random = Callable[..., Tensor]
Rows = Sequence[tuple[int, int]]  # numbers of sequences, and of rows within each
Counts = tuple[int, ...]  # of each sequence


def kept_layers(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers that keep states, or keys and values, one of those that differ only in fixed decays."""
    kept = (layer for layer in sorted(layers, key=repr) if layer.states or layer.kv_widths)
    return [*{replace(layer, slopes=()) if isinstance(layer, Lightning) else layer: layer for layer in kept}.values()]


def broken_chains(layer: Layer, spec: ModelSpec, random: Random, device: str, mode: str) -> Iterator[str]:
    """Name numbers of rows, and of drafts, of one sequence that change bits of a layer of the model `spec`."""
    chains = Chains(layer, spec, random, device, mode)
    in_turn = chains.in_turn()
    if not chains.at_once().same_as(in_turn):
        yield f"{layer.kind} at {SEQUENCES[0]} rows of a sequence"
    for most in ACCEPTED:
        if not chains.drafted(most).same_as(in_turn):
            yield f"{layer.kind} at {MOST_DRAFTS} drafts of a sequence, of which {most} are accepted"


@dataclass(frozen=True)
class RowsOfStep:
    """Rows that one step computes."""

    rows: Rows
    drafted: Counts = ()  # of each sequence: its last rows that are drafts
    accepted: Counts = ()  # of each: drafts of its step before that were accepted
    rejected: Rows = ()  # drafts of other tokens than the sequence has


@dataclass(frozen=True)
class Found:
    """Outputs of rows, without those of rejected drafts, and all bytes of states and pages after them."""

    rows: list[int]  # numbers among ROWS, in the order of the outputs
    out_BC: Tensor
    states: Tensor
    pages: Tensor

    def same_as(self, in_turn: Found) -> bool:
        """Return whether all bits are those of `in_turn`, whose outputs are in the order of ROWS."""
        kept = torch.equal(self.states, in_turn.states) and torch.equal(self.pages, in_turn.pages)
        return kept and same_bits(self.out_BC, in_turn.out_BC[self.rows])


class Chains:
    """One layer with random weights, and random memory of three sequences, from which each run begins."""

    def __init__(self, layer: Layer, spec: ModelSpec, random: Random, device: str, mode: str) -> None:
        narrow, end = replace(layer, hidden=NARROW), spec.page_size
        if isinstance(narrow, WindowAttention):
            end = min(narrow.window, LONGEST_RING)
            narrow = replace(narrow, window=end)
        elif layer.kv_widths:
            end = -(-SPLIT // spec.page_size) * spec.page_size
        self.layer, self.device, self.dtype = narrow, device, random(1).dtype
        block = Block("norm.weight", (Part(self.layer, "layer"),))
        architecture = Architecture(layer.kind, NARROW, NARROW, (block,), spec.max_length, spec.norm_eps)
        own = ModelSpec.of(architecture, spec.dtype_name, spec.page_size)
        tensors = {name: random(*shape).float() * NARROW**-0.5 for name, shape in self.layer.tensors().items()}
        with numerics.using(Numerics(mode)):
            self.function = layer_function(0, self.layer, Weights(tensors, self.dtype, device))
        self.firsts = max(FIRST, end - BEFORE_END), FIRST, SPLIT - 2 if end >= SPLIT else FIRST
        pages = [(first + n - 1) // spec.page_size + 1 for first, n in zip(self.firsts, SEQUENCES, strict=True)]
        self.page_size, self.tables = spec.page_size, torch.arange(sum(pages), device=device).split(pages)
        self.arena = Arena(own, sum(pages) if layer.kv_widths else 1, device)
        self.states = StateMemory(own.state, len(SEQUENCES), own.state.bytes, device)
        kept = [self.states.view(0, name) for name, _ in self.layer.states]
        for part in (*kept, *(self.arena.pages_of(0) if layer.kv_widths else ())):
            part.copy_(random(*part.shape))
        self.before = self.states.bytes_RB.clone(), self.arena.pages.clone()
        self.x_BC = random(2 * len(ROWS), NARROW)  # of ROWS, then of the drafts in their places that are rejected

    def in_turn(self) -> Found:
        """Compute each row in a step of its own."""
        return self._run(*(RowsOfStep([row]) for row in ROWS))

    def at_once(self) -> Found:
        """Compute all rows in one step."""
        return self._run(RowsOfStep(ROWS))

    def drafted(self, most: int) -> Found:
        """Compute all rows of a sequence but its last one, all but the first as drafts; accept `most` of each.

        The next step computes the rows that were not accepted.
        """
        rows = [(sequence, number) for sequence, number in ROWS if number < max(1, SEQUENCES[sequence] - 1)]
        drafts = tuple(max(0, n - 2) for n in SEQUENCES)
        accepted = tuple(min(most, n) for n in drafts)
        rejected = [(sequence, number) for sequence, number in rows if number > accepted[sequence]]
        left = [(sequence, number) for sequence, number in ROWS if number > accepted[sequence]]
        of_left = tuple(accepted[sequence] for sequence in sorted({sequence for sequence, _ in left}))
        return self._run(RowsOfStep(rows, drafts, rejected=rejected), RowsOfStep(left, accepted=of_left))

    def _run(self, *steps: RowsOfStep) -> Found:
        """Compute steps one after the other."""
        for part, before in zip((self.states.bytes_RB, self.arena.pages), self.before, strict=True):
            part.copy_(before)
        self.states.kept.clear()
        outputs, rows = list[Tensor](), list[int]()
        for step in steps:
            true = [row not in step.rejected for row in step.rows]
            outputs.append(self._step(step)[torch.tensor(true, device=self.device)])
            rows += [ROWS.index(row) for row, is_true in zip(step.rows, true, strict=True) if is_true]
        return Found(rows, torch.cat(outputs), self.states.bytes_RB.clone(), self.arena.pages.clone())

    def _step(self, step: RowsOfStep) -> Tensor:
        rows = step.rows
        positions = [self.firsts[sequence] + number for sequence, number in rows]
        position_B, slot_B = (torch.tensor(x, device=self.device) for x in (positions, [s for s, _ in rows]))
        before = [None, *(sequence for sequence, _ in rows)]
        batch = StepBatch(
            token_N=position_B,
            position_N=position_B,
            slices=(),
            decode_slot_B=slot_B,
            decode_tables=tuple(
                self.tables[sequence][: position // self.page_size + 1]
                for (sequence, _), position in zip(rows, positions, strict=True)
            ),
            logits_row_R=position_B[:0],
            parents=tuple(i - 1 if sequence == before[i] else STATE for i, (sequence, _) in enumerate(rows)),
            drafted=step.drafted,
            accepted=step.accepted,
        )
        of_device = layer_classes(self.device).attention_step
        attention = of_device.of(batch, self.arena, self.dtype) if self.layer.kv_widths else None
        x_BC = self.x_BC[[ROWS.index(row) + len(ROWS) * (row in step.rejected) for row in rows]]
        return self.function(x_BC, Step(batch, attention, self.states, self.dtype, (), None))
