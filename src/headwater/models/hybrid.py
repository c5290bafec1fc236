"""A hybrid model: a residual stream, and layers that take it through a norm and add to it.

Shapes: N rows of a step, C model width, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.mixers.attention.step import AttentionStep
from headwater.mixers.batch import StepBatch
from headwater.mixers.linear import Embedding, Linear
from headwater.mixers.norm import RMSNorm
from headwater.spec import Block, ModelSpec


@dataclass(frozen=True)
class Step:
    """What the layers of one forward pass work on."""

    batch: StepBatch
    attention: AttentionStep | None  # None for a model without attention layers
    states: StateMemory
    dtype: torch.dtype  # that layers compute in


Function = Callable[[torch.Tensor, Step], torch.Tensor]  # rows [N, C] in, rows out


@dataclass(frozen=True)
class Residual:
    """A block of the spec, with the functions of its parts."""

    block: Block
    norm: RMSNorm
    functions: tuple[Function, ...]

    def forward(self, x_NC: torch.Tensor, step: Step) -> torch.Tensor:
        """The residual stream after this block; `x_NC` is not needed any more."""
        block = self.block
        normed_NC = self.norm(x_NC).to(step.dtype)
        kept_NC = normed_NC.clone() if block.keeps_normed else x_NC
        if block.keep != 1.0:
            kept_NC *= block.keep
        for part, function in zip(block.parts, self.functions, strict=True):
            out_NC = function(_scaled(normed_NC, part.in_scale), step)
            kept_NC += _scaled(out_NC, part.out_scale * block.scale)
        return kept_NC


class HybridModel:
    """Weights, and the one function over them. It owns no state: keys, values and states come with the call."""

    def __init__(self, spec: ModelSpec, blocks: list[Residual], embed: Embedding, norm: RMSNorm, head: Linear) -> None:
        self.spec = spec
        self.blocks = blocks
        self.embed, self.norm, self.head = embed, norm, head
        self.dtype = getattr(torch, spec.dtype_name)
        # Rows of a step: with fewer, each product would have to be filled up. Not where idle rows would choose experts.
        self.least_rows = 1 if spec.routes else head.least_rows

    @torch.inference_mode()
    def forward(self, batch: StepBatch, arena: Arena, states: StateMemory) -> torch.Tensor:
        """Compute one step: write its KV to the arena, move its states on; float32 logits [R, V] of `logits_row_R`."""
        attention = AttentionStep.of(batch, arena, self.dtype) if self.spec.attention_layers else None
        step = Step(batch, attention, states, self.dtype)
        x_NC = _scaled(self.embed(batch.token_N), self.spec.embedding_scale)
        x_NC = x_NC.float() if self.spec.float32_residual else x_NC
        for block in self.blocks:
            x_NC = block.forward(x_NC, step)
        last_RC = self.norm(x_NC[batch.logits_row_R]).to(self.dtype)
        return _scaled(self.head(last_RC).float(), self.spec.logits_scale)


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale == 1.0 else x * scale
