"""A hybrid model: a residual stream, and blocks of layers that read it through a norm and add to it.

Shapes: N rows of a step, C model width, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headwater.layers.architecture import Block
from headwater.memory.arena import Arena
from headwater.memory.slots import Segment, StateMemory
from headwater.memory.tails import TailMemory
from headwater.mixers.activations import StreamNorm, Unnormed
from headwater.mixers.attention import Attention, AttentionStep
from headwater.mixers.batch import StepBatch
from headwater.mixers.drafts import Kept
from headwater.mixers.feed_forward import FeedForward
from headwater.mixers.linear import Embedding, Linear
from headwater.mixers.mla import LatentAttentionMixer
from headwater.mixers.recurrent import LayerState, RecurrentMixer, SegmentState
from headwater.mixers.slices import Slice
from headwater.mixers.window import Rings, SegmentWindow, WindowAttentionMixer
from headwater.spec import ModelSpec


@dataclass(frozen=True)
class Step:
    """The inputs and memory that the layers of one forward pass share."""

    batch: StepBatch
    attention: AttentionStep | None  # None for a model without attention layers
    states: StateMemory
    dtype: torch.dtype  # dtype that layers compute in
    segments: Sequence[Segment] = ()  # segments that slices compose with
    transitions: StateMemory | None = None  # rows that slices update, if any segment is being built
    tails: TailMemory | None = None  # rows that slices continue or write

    def state(self, layer: int, convolved: bool) -> LayerState:
        """Return views of a recurrent layer's states, transitions and segments."""
        transition = self.transitions.view(layer, "transition") if self.transitions else None
        segments = tuple(
            SegmentState(
                segment.transitions.view(layer, "transition") if segment.transitions else None,
                segment.states.view(layer, "recurrent"),
                segment.states.view(layer, "conv") if convolved else None,
            )
            for segment in self.segments
        )
        conv = self.states.view(layer, "conv") if convolved else None
        kept = Kept(self.states.kept[layer, "recurrent"])
        return LayerState(self.states.view(layer, "recurrent"), conv, transition, segments, kept, self.tail(layer))

    def tail(self, layer: int) -> torch.Tensor | None:
        """Return the inputs that tails keep of a layer."""
        return None if self.tails is None else self.tails.view(layer)

    def rings(self, layer: int) -> tuple[Rings, Rings]:
        """Return the keys and the values of a layer with a window."""
        keys, values = (
            Rings(self.states.view(layer, name), Kept(self.states.kept[layer, name])) for name in ("keys", "values")
        )
        return keys, values

    def windows(self, layer: int) -> tuple[SegmentWindow, ...]:
        """Return what a layer with a window stores for each segment."""
        return tuple(
            SegmentWindow(s.states.view(layer, "keys"), s.states.view(layer, "values"), s.interior)
            for s in self.segments
        )


# -- dispatch: each kind of layer takes its own views of the step ----------------


Function = Callable[[torch.Tensor, Step], torch.Tensor]  # rows [N, C] in, rows out
Output = tuple[torch.Tensor, float]  # rows that a layer adds to the residual stream, and their factor


class RecurrentLayer(Protocol):
    """A recurrent mixer, or one with kernels."""

    def forward(self, x_ND: torch.Tensor, batch: StepBatch, state: LayerState) -> torch.Tensor: ...

    def outputs(self, products: tuple[torch.Tensor, ...], batch: StepBatch, state: LayerState) -> torch.Tensor: ...


@dataclass(frozen=True)
class RecurrentFunction:
    """A layer with a recurrent state."""

    index: int  # number of the layer in the state memory
    layer: RecurrentLayer
    convolved: bool

    def __call__(self, x_NC: torch.Tensor, step: Step) -> torch.Tensor:
        return self.layer.forward(x_NC, step.batch, step.state(self.index, self.convolved))


@dataclass(frozen=True)
class WindowFunction:
    """A layer of sliding-window attention."""

    index: int  # number of the layer in the state memory
    layer: WindowAttentionMixer

    def __call__(self, x_NC: torch.Tensor, step: Step) -> torch.Tensor:
        windows = step.windows(self.index)
        return self.layer.forward(x_NC, step.batch, *step.rings(self.index), windows, step.tail(self.index))


@dataclass(frozen=True)
class AttentionFunction:
    """A layer with pages in the arena."""

    layer: Attention | LatentAttentionMixer

    def __call__(self, x_NC: torch.Tensor, step: Step) -> torch.Tensor:
        assert step.attention is not None
        return self.layer.forward(x_NC, step.attention)


@dataclass(frozen=True)
class FeedForwardFunction:
    """A layer that keeps nothing of a sequence."""

    layer: FeedForward

    def __call__(self, x_NC: torch.Tensor, step: Step) -> torch.Tensor:
        return self.layer.forward(x_NC, step.batch.n_prefill)


@dataclass(frozen=True)
class Residual:
    """A block of the spec with the functions of its parts."""

    block: Block
    norm: StreamNorm | Unnormed
    functions: tuple[Function, ...]
    norm_after: StreamNorm | None = None

    def forward(self, x_NC: torch.Tensor, last: Output | None, step: Step) -> tuple[torch.Tensor, Output]:
        """Add the last block's output to the residual stream `x_NC` in place, and compute this block over it.

        Return the stream, and this block's output, which is not added yet.
        """
        block = self.block
        normed_NC = self.norm(x_NC) if last is None else self.norm.after(x_NC, *last)
        kept_NC = normed_NC.clone() if block.keeps_normed else x_NC
        if block.keep != 1.0:
            kept_NC *= block.keep
        outputs: list[Output] = []
        for part, function in zip(block.parts, self.functions, strict=True):
            for output in outputs[-1:]:
                kept_NC += _scaled(*output)
            out_NC = function(_scaled(normed_NC, part.in_scale), step)
            out_NC = out_NC if self.norm_after is None else self.norm_after(out_NC)
            outputs.append((out_NC, part.out_scale * block.scale))
        return kept_NC, outputs[-1]


@dataclass(frozen=True)
class Mixers:
    """The layers that keep pages or states of a sequence, by their number."""

    recurrent: dict[int, RecurrentMixer[Any]]
    attention: dict[int, Attention | LatentAttentionMixer]
    windows: dict[int, WindowAttentionMixer]


class HybridModel:
    """The weights of a model and its forward pass. It owns no state: arena and state memory are arguments."""

    def __init__(
        self,
        spec: ModelSpec,
        blocks: list[Residual],
        mixers: Mixers,
        embed: Embedding,
        norm: StreamNorm,
        head: Linear,
        attention_step: type[AttentionStep] = AttentionStep,
    ) -> None:
        self.spec = spec
        self.blocks = blocks
        self.mixers = mixers
        self.embed, self.norm, self.head = embed, norm, head
        self.attention_step = attention_step
        self.dtype: torch.dtype = getattr(torch, spec.dtype_name)

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,
        arena: Arena,
        states: StateMemory,
        segments: Sequence[Segment] = (),
        transitions: StateMemory | None = None,
        hidden_NC: torch.Tensor | None = None,
        tails: TailMemory | None = None,
    ) -> torch.Tensor:
        """Compute one step: write KV to the arena, update states; return float32 logits [R, V] of `logits_row_R`.

        Slices name `segments` by index, and rows of `transitions`, a memory laid out as `spec.transition`. With
        `hidden_NC` the hidden states of all rows, after the final norm, are written there. Slices name rows of `tails`,
        which they continue or write.
        """
        attention = self.attention_step.of(batch, arena, self.dtype) if self.spec.attention_layers else None
        step = Step(batch, attention, states, self.dtype, segments, transitions, tails)
        x_NC = _scaled(self.embed(batch.token_N), self.spec.embedding_scale)
        x_NC = x_NC.float() if self.spec.float32_residual else x_NC
        output: Output | None = None
        for block in self.blocks:
            x_NC, output = block.forward(x_NC, output, step)
        if tails is not None:
            self._keep_hidden(x_NC, output, batch.slices, tails)
        if hidden_NC is None:
            last_RC = self._last(x_NC, output, batch.logits_rows)
        else:
            last_NC = self._last(x_NC, output, slice(None))
            hidden_NC.copy_(last_NC)
            last_RC = last_NC[batch.logits_rows]
        return self.logits(last_RC)

    @torch.inference_mode()
    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [R, V] of hidden rows after the final norm."""
        return _scaled(self.head(hidden_RC, 0).float(), self.spec.logits_scale)  # rows of logits are all decode's

    @torch.inference_mode()
    def advance(self, slices: Sequence[Slice], states: StateMemory, tails: TailMemory) -> None:
        """Advance states over the kept rows of slices without rows of their own. No product with weights is computed.

        An exception are Mamba-1's steps, which follow from what its convolution gives.
        """
        none_B = torch.empty(0, dtype=torch.int64, device=states.bytes_RB.device)
        batch = StepBatch(none_B, none_B, tuple(slices), none_B, (), none_B)
        step = Step(batch, None, states, self.dtype, tails=tails)
        x_0C = torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=none_B.device)
        for block in self.blocks:
            for function in block.functions:
                if isinstance(function, (RecurrentFunction, WindowFunction)):
                    function(x_0C, step)

    def _keep_hidden(
        self, x_NC: torch.Tensor, output: Output | None, slices: Sequence[Slice], tails: TailMemory
    ) -> None:
        """Write the hidden rows of the last tokens of tails to the tails that keep them."""
        kept = [(s, keep) for s in slices for keep in s.keeps if keep.has_hidden]
        assert all(s.start < keep.end <= s.end for s, keep in kept), "the token of a hidden row is not in its slice"
        at = [(s.first + keep.end - 1 - s.start, keep.row) for s, keep in kept]
        if at:
            row_K, to_K = torch.tensor(at, device=x_NC.device).unbind(1)
            tails.hidden_RC[to_K] = self._last(x_NC, output, row_K)

    def _last(self, x_NC: torch.Tensor, output: Output | None, row_R: torch.Tensor | slice) -> torch.Tensor:
        """Return the norm of some rows of the residual stream after the last block, whose output is added to them."""
        last_RC = x_NC[row_R]
        return self.norm(last_RC) if output is None else self.norm.after(last_RC, output[0][row_R], output[1])

    # -- segments ----------------------------------------------------------------

    @torch.inference_mode()
    def identities(self, transitions: StateMemory, row: int) -> None:
        """Set a row of transitions to those of no tokens, with which building a segment begins."""
        for layer, mixer in self.mixers.recurrent.items():
            transitions.view(layer, "transition")[row] = mixer.identity()

    @torch.inference_mode()
    def zero_start(
        self, states: StateMemory, head_row: int, end_row: int, transitions: StateMemory, transition_row: int
    ) -> None:
        """Replace the states after a segment's interior, in `end_row`, by its zero-start states: S_end − T·S_head.

        `head_row` holds the states before the interior. Inputs of convolutions and windows stay as they are.
        """
        for layer, mixer in self.mixers.recurrent.items():
            recurrent = states.view(layer, "recurrent")
            transition_X = transitions.view(layer, "transition")[transition_row]
            recurrent[end_row] = mixer.zero_start(recurrent[end_row], transition_X, recurrent[head_row])

    @torch.inference_mode()
    def place(
        self, arena: Arena, from_table: torch.Tensor, to_table: torch.Tensor, start: int, end: int, at: int
    ) -> None:
        """Copy KV of a segment's tokens [start, end) to positions [at + start, at + end) of a sequence.

        Keys are re-rotated by `at`. Tables are int64: the pages of the segment (read only) and of the sequence, each
        from position 0.
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
