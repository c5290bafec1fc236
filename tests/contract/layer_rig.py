"""One recurrent layer and its state memory, run step by step without a model.

L tokens of a sequence, B decoding sequences, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headwater.mixers.batch import STATE, StepBatch
from headwater.mixers.recurrent import LayerState, SegmentState
from headwater.mixers.slices import Slice
from tests.contract.recurrences import Case

ROWS, TRANSITIONS = 40, 4
NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + len(x)) of a sequence."""

    x_LD: torch.Tensor
    slot: int
    start: int = 0
    saves: tuple[tuple[int, int], ...] = ()
    transition: int | None = None
    composes: tuple[tuple[int, int], ...] = ()
    unread: int = 0


class LayerRig:
    """Rows of the state memory are full of NaN, so reads of unwritten values show."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32) -> None:
        self.layer = case.build(dtype)
        dtypes = {name: torch.float32 if name in case.layer.float32_states else dtype for name, _ in case.layer.states}
        states = {
            name: torch.full((ROWS, *shape), float("nan"), dtype=dtypes[name]) for name, shape in case.layer.states
        }
        identity_X = self.layer.identity()
        transition = torch.full((TRANSITIONS, *identity_X.shape), float("nan"))
        self.state = LayerState(states["recurrent"], states.get("conv"), transition)
        self.length = [0] * ROWS  # tokens before each row's state

    def step(
        self, pieces: list[Piece], decode_x_BD: torch.Tensor | None = None, slots: tuple[int, ...] = ()
    ) -> list[torch.Tensor]:
        """Run one ragged step; outputs of each piece, then of all decoded tokens.

        Adjacent ones with the same slot are of one sequence.
        """
        slices, positions = [], []
        for p in pieces:
            if p.start == 0:
                self.zero(p.slot)
            of_state = (p.saves, p.transition, p.composes)
            slices.append(Slice(len(positions), len(p.x_LD), p.start, p.slot, NONE, 0, *of_state, unread=p.unread))
            self.length[p.slot] = p.start + len(p.x_LD)
            positions += range(p.start, self.length[p.slot])
        for slot in slots:
            positions.append(self.length[slot])
            self.length[slot] += 1
        rows = [p.x_LD for p in pieces] + ([decode_x_BD] if decode_x_BD is not None else [])
        adjacent = [STATE, *(row if slot == slots[row] else STATE for row, slot in enumerate(slots[1:]))]
        batch = StepBatch(
            token_N=NONE,
            position_N=torch.tensor(positions),
            slices=tuple(slices),
            decode_slot_B=torch.tensor(slots),
            decode_tables=(NONE,) * len(slots),
            logits_row_R=NONE,
            parents=tuple(adjacent[: len(slots)]),
        )
        out_ND = self.layer.forward(torch.cat(rows), batch, self.state)
        return list(out_ND.split([len(r) for r in rows]))

    def make(self, x_LD: torch.Tensor, head: int, tail: int) -> None:
        """A segment, computed by itself, is one more that pieces compose with: all of it but its head and its tail."""
        end = len(x_LD) - tail
        self.zero(0)
        self.state.transition[0] = self.layer.identity()
        of_head = [Piece(x_LD[:head], 0, saves=((head, 1),))] if head else []
        self.copy(0, 1)
        self.step([*of_head, Piece(x_LD[head:end], 0, head, transition=0)])
        transition_X, recurrent = self.state.transition[0].clone(), self.state.recurrent
        zero_start_X = self.layer.zero_start(recurrent[0], transition_X, recurrent[1])
        conv_Cw = None if self.state.conv is None else self.state.conv[0].clone()
        made = SegmentState(transition_X, zero_start_X, conv_Cw)
        self.state = replace(self.state, segments=(*self.state.segments, made))

    def zero(self, row: int) -> None:
        """The state before the first token."""
        self.state.recurrent[row], self.length[row] = 0, 0
        if self.state.conv is not None:
            self.state.conv[row] = 0

    def copy(self, row: int, to: int) -> None:
        self.state.recurrent[to], self.length[to] = self.state.recurrent[row], self.length[row]
        if self.state.conv is not None:
            self.state.conv[to] = self.state.conv[row]

    def same_conv(self, row: int, other: LayerRig, other_row: int) -> bool:
        mine, its = self.state.conv, other.state.conv
        return mine is None or (its is not None and torch.equal(mine[row], its[other_row]))

    def same_state(self, row: int, other: LayerRig, other_row: int) -> bool:
        """Bit for bit."""
        recurrent = torch.equal(self.state.recurrent[row], other.state.recurrent[other_row])
        return recurrent and self.same_conv(row, other, other_row)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the largest value wanted. NaN where there is one."""
    return float((got.double() - wanted).abs().max() / wanted.abs().max())
