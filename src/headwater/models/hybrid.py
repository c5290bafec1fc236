"""A hybrid model: a stack of blocks, each a mixer over tokens and a feed-forward network over channels.

Shapes: N rows of a step, C model width, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.mixers.attention.rotary import RotaryTable
from headwater.mixers.attention.step import AttentionStep
from headwater.mixers.batch import StepBatch
from headwater.mixers.linear import Embedding, Linear
from headwater.mixers.norm import RMSNorm
from headwater.spec import ModelSpec


@dataclass(frozen=True)
class Step:
    """What the mixers of one forward pass work on."""

    batch: StepBatch
    attention: AttentionStep | None  # None for a model without attention layers
    states: StateMemory


class FeedForward(Protocol):
    """A network over channels, row by row."""

    def forward(self, x_NC: torch.Tensor, n_prefill: int = 0) -> torch.Tensor: ...


@dataclass(frozen=True)
class Block:
    """x += mixer(norm(x)); x += ffn(norm(x))."""

    mixer_norm: RMSNorm
    mixer: Callable[[torch.Tensor, Step], torch.Tensor]
    ffn_norm: RMSNorm
    ffn: FeedForward

    def forward_into(self, x_NC: torch.Tensor, step: Step) -> None:
        """Run the block on the residual stream in place."""
        x_NC += self.mixer(self.mixer_norm(x_NC), step)
        x_NC += self.ffn.forward(self.ffn_norm(x_NC), step.batch.n_prefill)


class HybridModel:
    """Weights, and the one function over them. It owns no state: keys, values and states come with the call."""

    def __init__(self, spec: ModelSpec, layers: list[Block], embed: Embedding, norm: RMSNorm, head: Linear) -> None:
        self.spec = spec
        self.layers = layers
        self.embed, self.norm, self.head = embed, norm, head
        self.dtype = getattr(torch, spec.dtype_name)
        # Rows of a step: with fewer, each product would have to be filled up. Not where idle rows would choose experts.
        self.least_rows = head.least_rows if spec.moe is None else 1
        self.rotary = RotaryTable(spec.attention, embed.table_VD.device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, arena: Arena, states: StateMemory) -> torch.Tensor:
        """Compute one step: write its KV to the arena, move its states on; float32 logits [R, V] of `logits_row_R`."""
        attention = AttentionStep.of(batch, arena, self.rotary, self.dtype) if self.spec.attention_layers else None
        step = Step(batch, attention, states)
        x_NC = self.embed(batch.token_N)
        for layer in self.layers:
            layer.forward_into(x_NC, step)
        return self.head(self.norm(x_NC[batch.logits_row_R])).float()
