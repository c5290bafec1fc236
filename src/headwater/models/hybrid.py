"""A hybrid model: a residual stream, and layers that take it through a norm and add to it.

Shapes: N rows of a step, C model width, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headwater.memory.arena import Arena
from headwater.memory.segments import Segment
from headwater.memory.slots import StateMemory
from headwater.mixers.attention.layer import Attention
from headwater.mixers.attention.step import AttentionStep
from headwater.mixers.batch import StepBatch
from headwater.mixers.composing import zero_start
from headwater.mixers.linear import Embedding, Linear
from headwater.mixers.mla import LatentAttentionMixer
from headwater.mixers.norm import RMSNorm
from headwater.mixers.recurrent import RecurrentMixer
from headwater.mixers.window import WindowAttentionMixer
from headwater.spec import Block, ModelSpec


@dataclass(frozen=True)
class Step:
    """What the layers of one forward pass work on."""

    batch: StepBatch
    attention: AttentionStep | None  # None for a model without attention layers
    states: StateMemory
    dtype: torch.dtype  # that layers compute in
    segments: Sequence[Segment]  # that slices compose with
    transitions: StateMemory | None  # rows that move on with slices, where any are wanted


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


@dataclass(frozen=True)
class Mixers:
    """The layers that remember something of a sequence, by their number."""

    recurrent: Mapping[int, RecurrentMixer[Any]]
    attention: Mapping[int, Attention | LatentAttentionMixer]
    windows: Mapping[int, WindowAttentionMixer]


class HybridModel:
    """Weights, and the one function over them. It owns no state: keys, values and states come with the call."""

    def __init__(
        self, spec: ModelSpec, blocks: list[Residual], mixers: Mixers, embed: Embedding, norm: RMSNorm, head: Linear
    ) -> None:
        self.spec = spec
        self.blocks = blocks
        self.mixers = mixers
        self.embed, self.norm, self.head = embed, norm, head
        self.dtype = getattr(torch, spec.dtype_name)
        # Rows of a step: with fewer, each product would have to be filled up. Not where idle rows would choose experts.
        self.least_rows = 1 if spec.routes else head.least_rows

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,
        arena: Arena,
        states: StateMemory,
        segments: Sequence[Segment] = (),
        transitions: StateMemory | None = None,
    ) -> torch.Tensor:
        """Compute one step: write its KV to the arena, move its states on; float32 logits [R, V] of `logits_row_R`.

        Slices name `segments` by their index, and rows of `transitions`, a memory of `spec.transition`.
        """
        attention = AttentionStep.of(batch, arena, self.dtype) if self.spec.attention_layers else None
        step = Step(batch, attention, states, self.dtype, segments, transitions)
        x_NC = _scaled(self.embed(batch.token_N), self.spec.embedding_scale)
        x_NC = x_NC.float() if self.spec.float32_residual else x_NC
        for block in self.blocks:
            x_NC = block.forward(x_NC, step)
        last_RC = self.norm(x_NC[batch.logits_row_R]).to(self.dtype)
        return _scaled(self.head(last_RC).float(), self.spec.logits_scale)

    # -- segments: what is computed apart and composed -------------------------

    @torch.inference_mode()
    def identities(self, transitions: StateMemory, row: int) -> None:
        """The transitions of no tokens, with which the making of a segment begins."""
        for layer, mixer in self.mixers.recurrent.items():
            transitions.view(layer, "transition")[row] = mixer.identity()

    @torch.inference_mode()
    def zero_start(
        self, states: StateMemory, head_row: int, end_row: int, transitions: StateMemory, transition_row: int
    ) -> None:
        """Make the states after a segment's interior, in `end_row`, those of a start from zeros: S_end − T·S_head.

        `head_row` holds the states before the interior. The convolutions' inputs stay as they are, and so do windows.
        """
        for layer, mixer in self.mixers.recurrent.items():
            recurrent = states.view(layer, "recurrent")
            transition_X = transitions.view(layer, "transition")[transition_row]
            recurrent[end_row] = zero_start(mixer, recurrent[end_row], transition_X, recurrent[head_row])

    @torch.inference_mode()
    def place(
        self, arena: Arena, from_table: torch.Tensor, to_table: torch.Tensor, start: int, end: int, at: int
    ) -> None:
        """Copy KV of a segment's tokens [start, end) to positions [at + start, at + end) of a sequence.

        Keys are rotated on by `at`. Tables are int64, the pages of the segment (which are not written) and of the
        sequence, from position 0 of each.
        """
        if not self.mixers.attention:
            return
        from_T = torch.arange(start, end, device=from_table.device)
        to_T = from_T + at
        page_T, offset_T = to_table[to_T // arena.page_size], to_T % arena.page_size
        for layer, attention in self.mixers.attention.items():
            kept = attention.moved(arena.read(layer, from_table, start, end), from_T, to_T)
            arena.write(layer, page_T, offset_T, *kept)


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale == 1.0 else x * scale
