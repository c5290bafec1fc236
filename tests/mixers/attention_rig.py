"""Rig of one attention layer over pages, which tests feed with prompts and decoded tokens."""

from __future__ import annotations

from typing import Any

import torch

from headwater.memory.arena import Arena
from headwater.mixers.attention import AttentionStep
from headwater.mixers.batch import StepBatch
from headwater.mixers.slices import Slice


class AttentionRig:
    """Base of rigs, which set the layer, a poisoned arena, and the tokens [L, D] of a prompt."""

    layer: Any
    arena: Arena
    dtype: torch.dtype
    x: torch.Tensor
    steps: type[AttentionStep] = AttentionStep

    def run(self, slices: list[Slice], decodes: list[tuple[int, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        """Run the layer on rows [N, D]: slices of prompts, then tokens that are decoded, by position and table."""
        positions = [torch.arange(s.start, s.end) for s in slices] + [torch.tensor([p]) for p, _ in decodes]
        batch = StepBatch(
            token_N=torch.zeros(len(x), dtype=torch.int64),
            position_N=torch.cat(positions),
            slices=tuple(slices),
            decode_slot_B=torch.arange(len(decodes)),
            decode_tables=tuple(table for _, table in decodes),
            logits_row_R=torch.arange(0),
        )
        out: torch.Tensor = self.layer.forward(x, self.steps.of(batch, self.arena, self.dtype))
        return out

    def prefill(self, table: torch.Tensor, bounds: list[int], length: int | None = None) -> torch.Tensor:
        """Run the first `length` tokens of the prompt, all by default, cut at these bounds."""
        out = []
        for start, end in zip([0, *bounds], [*bounds, length or len(self.x)], strict=True):
            out.append(self.run([Slice(0, end - start, start, 0, table, start // 64)], [], self.x[start:end]))
        return torch.cat(out)
