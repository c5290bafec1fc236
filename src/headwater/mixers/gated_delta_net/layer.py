"""A Gated DeltaNet layer: projections, short convolution, gates, delta rule, gated norm.

N rows of a step, P prefill rows, B decoding sequences, C convolved channels, W convolution width, n chunks, t = 64,
G key heads, H value heads, K key width, V value width, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from headwater.mixers.activations import gated_rms_norm, sigmoid, silu, softplus
from headwater.mixers.batch import Slice, StepBatch
from headwater.mixers.gated_delta_net.fast import CHUNK, advance_into, decode_step, prepare
from headwater.mixers.linear import Linear
from headwater.spec import DeltaNetShape

HEADS_A_BLOCK = 32  # chunks × heads whose intermediates stay in cache: 2-4 chunks of a small model, 1 of a large


@dataclass(frozen=True)
class Rows:
    """All rows of a step between the layer's two projections."""

    mixed_NC: torch.Tensor  # inputs of the convolution
    gates_N2H: torch.Tensor  # log of the decay, writing strength; float32
    z_NHV: torch.Tensor  # gates of the output, before silu
    out_NHV: torch.Tensor  # what out_proj takes, to be written


@dataclass(frozen=True)
class LayerState:
    """All rows of one layer's state memory. Rows may be strided; each is contiguous."""

    recurrent: torch.Tensor  # [rows, H, K, V] float32
    conv: torch.Tensor  # [rows, C, W − 1]: the last inputs of the convolution, oldest first


@dataclass(frozen=True, slots=True)
class Chunk:
    """At most 64 tokens of a slice."""

    slice: Slice
    index: int

    @property
    def first(self) -> int:
        """Its first row in the step."""
        return self.slice.first + self.index * CHUNK

    @property
    def length(self) -> int:
        return min(CHUNK, self.slice.length - self.index * CHUNK)

    @property
    def rows(self) -> slice:
        """Its rows in the step."""
        return slice(self.first, self.first + self.length)

    @property
    def is_last(self) -> bool:
        return (self.index + 1) * CHUNK >= self.slice.length

    @property
    def state_rows(self) -> list[int]:
        """Rows of the state memory that take the state after this chunk."""
        end = self.slice.start + self.index * CHUNK + self.length
        rows = [row for position, row in self.slice.saves if position == end]
        return [*rows, self.slice.slot] if self.is_last else rows


class GatedDeltaNet:
    """The mixer of Qwen3-Next and Qwen3.5. Weights by the names that checkpoints give them, relative to the layer."""

    def __init__(self, shape: DeltaNetShape, eps: float, tensors: Mapping[str, torch.Tensor]) -> None:
        self.shape, self.eps = shape, eps
        self.in_proj = Linear(fused_projection(shape, tensors))
        self.out_proj = Linear(tensors["out_proj.weight"])
        self.conv_WC = tensors["conv1d.weight"].squeeze(1).float().T.contiguous()
        self.decay_H = tensors["A_log"].float().exp().neg()
        self.dt_bias_H = tensors["dt_bias"].float()
        self.norm_V = tensors["norm.weight"].float()

    def forward(self, x_ND: torch.Tensor, batch: StepBatch, state: LayerState) -> torch.Tensor:
        """Rows of a step in, rows out; sequences' states move on in `state`, and are copied to the rows of saves."""
        s = self.shape
        projected_NE = self.in_proj(x_ND, batch.n_prefill)
        widths = (s.channels, s.v_heads * s.v_dim, s.v_heads, s.v_heads)
        mixed_NC, z_NX, b_NH, a_NH = projected_NE.split(widths, -1)
        z_NHV = z_NX.unflatten(-1, (s.v_heads, s.v_dim))
        rows = Rows(mixed_NC, self._gates(a_NH, b_NH), z_NHV, x_ND.new_empty(z_NHV.shape))
        rows.out_NHV[batch.decode_rows.stop :] = 0
        self._prefill_into(rows, batch, state)
        if batch.n_decode:
            decoding = batch.decode_rows
            out_BHV = self._decode(mixed_NC[decoding], rows.gates_N2H[decoding], batch.decode_slot_B, state)
            self._norm_into(rows, decoding, out_BHV)
        return self.out_proj(rows.out_NHV.flatten(1), batch.n_prefill)

    def _gates(self, a_NH: torch.Tensor, b_NH: torch.Tensor) -> torch.Tensor:
        """log of the decay, −e^A softplus(a + dt), and the writing strength, sigmoid(b), in float32."""
        g_NH = softplus(a_NH.float() + self.dt_bias_H).mul_(self.decay_H)
        return torch.stack((g_NH, sigmoid(b_NH.float())), 1)

    def _norm_into(self, rows: Rows, at: slice, read_nHV: torch.Tensor) -> None:
        """The output of some rows, from what they read of their states."""
        rows.out_NHV[at] = gated_rms_norm(read_nHV, rows.z_NHV[at], self.norm_V, self.eps)

    def _prefill_into(self, rows: Rows, batch: StepBatch, state: LayerState) -> None:
        limit = max(1, HEADS_A_BLOCK // self.shape.v_heads)
        slices = sorted(batch.slices, key=lambda s: -s.length)
        for at in range(0, len(slices), limit):
            group = slices[at : at + limit]
            # In place where there is one sequence; several must be contiguous to be one batch, and are copied.
            slots = [s.slot for s in group]
            state_SHKV = state.recurrent[slots[0]].unsqueeze(0) if len(slots) == 1 else state.recurrent[slots]
            for n_active, chunks in blocks(group, limit):
                self._block_into(rows, chunks, state, state_SHKV[:n_active])

    def _block_into(self, rows: Rows, chunks: list[Chunk], state: LayerState, state_SHKV: torch.Tensor) -> None:
        """Several chunks of each of a few sequences, in order; `state_SHKV` moves on in place."""
        s = self.shape
        window_nLC = self._windows(rows.mixed_NC, chunks, state)
        gates_nt2H = rows.gates_N2H.new_zeros(len(chunks), CHUNK, 2, s.v_heads)
        for gates_t2H, chunk in zip(gates_nt2H, chunks, strict=True):
            gates_t2H[: chunk.length] = rows.gates_N2H[chunk.rows]
        qk_nt2GK, v_ntHV = self._heads(self._convolved(window_nLC))
        prepared = prepare(qk_nt2GK, v_ntHV, gates_nt2H[:, :, 0], gates_nt2H[:, :, 1])
        n_active = len(state_SHKV)
        state_MKV = state_SHKV.view(-1, s.k_dim, s.v_dim)
        read_nHtV = state_SHKV.new_empty(len(chunks), s.v_heads, CHUNK, s.v_dim)
        for first in range(0, len(chunks), n_active):
            at = slice(first * s.v_heads, (first + n_active) * s.v_heads)
            advance_into(prepared, at, state_MKV, read_nHtV[first : first + n_active].flatten(0, 1))
            for i in range(n_active):
                chunk = chunks[first + i]
                for row in chunk.state_rows:
                    state.recurrent[row] = state_SHKV[i]
                    state.conv[row] = window_nLC[first + i, chunk.length : chunk.length + s.conv_kernel - 1].T
        for chunk, read_HtV in zip(chunks, read_nHtV, strict=True):
            self._norm_into(rows, chunk.rows, read_HtV.transpose(0, 1)[: chunk.length])

    def _windows(self, mixed_NC: torch.Tensor, chunks: list[Chunk], state: LayerState) -> torch.Tensor:
        """The chunks' inputs of the convolution, float32, each with the W − 1 inputs before it; zeros fill them up."""
        before = self.shape.conv_kernel - 1
        window_nLC = torch.empty(
            (len(chunks), before + CHUNK, self.shape.channels), dtype=torch.float32, device=mixed_NC.device
        )
        for window_LC, chunk in zip(window_nLC, chunks, strict=True):
            window_LC[before + chunk.length :].zero_()
            if chunk.index:
                window_LC[: before + chunk.length] = mixed_NC[chunk.first - before : chunk.rows.stop]
            else:
                window_LC[:before] = state.conv[chunk.slice.slot].T
                window_LC[before : before + chunk.length] = mixed_NC[chunk.rows]
        return window_nLC

    def _convolved(self, window_nLC: torch.Tensor) -> torch.Tensor:
        """silu of the depthwise convolution, as shifted multiply-adds; [n, t, C]."""
        length = window_nLC.shape[1] - self.shape.conv_kernel + 1
        sum_ntC = window_nLC[:, :length] * self.conv_WC[0]
        for shift in range(1, self.shape.conv_kernel):
            sum_ntC.addcmul_(window_nLC[:, shift : shift + length], self.conv_WC[shift])
        return silu(sum_ntC)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Channels as [..., 2, G, K] (queries, keys) and [..., H, V]."""
        s = self.shape
        n_qk = 2 * s.k_heads * s.k_dim
        qk = mixed[..., :n_qk].unflatten(-1, (2, s.k_heads, s.k_dim))
        return qk, mixed[..., n_qk:].unflatten(-1, (s.v_heads, s.v_dim))

    def _decode(
        self, mixed_BC: torch.Tensor, gates_B2H: torch.Tensor, slot_B: torch.Tensor, state: LayerState
    ) -> torch.Tensor:
        slots = slot_B.tolist()
        conv_BCw = _rows_of(state.conv, slots)
        window_BLC = torch.cat((conv_BCw.mT.float(), mixed_BC.float().unsqueeze(1)), 1)
        conv_BCw.copy_(window_BLC[:, 1:].mT)
        qk_B2GK, v_BHV = self._heads(self._convolved(window_BLC)[:, 0])
        state_BHKV = _rows_of(state.recurrent, slots)
        out_BHV = decode_step(qk_B2GK, v_BHV, gates_B2H[:, 0], gates_B2H[:, 1], state_BHKV)
        if not _is_run(slots):
            state.conv.index_copy_(0, slot_B, conv_BCw)
            state.recurrent.index_copy_(0, slot_B, state_BHKV)
        return out_BHV


def _is_run(rows: list[int]) -> bool:
    return rows == list(range(rows[0], rows[0] + len(rows)))


def _rows_of(memory: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Those rows: a view where they are adjacent and ascending, else a copy."""
    if _is_run(rows):
        return memory[rows[0] : rows[0] + len(rows)]
    return memory.index_select(0, torch.tensor(rows, device=memory.device))


def blocks(group: list[Slice], limit: int) -> Iterator[tuple[int, list[Chunk]]]:
    """Chunks of slices (longest first) in the order of time: the n-th of each sequence, then the next.

    Yields (sequences that have a chunk in it, chunks): at most `limit` chunks and at least one step, and the same
    sequences in every step.
    """
    n_chunks = [-(-s.length // CHUNK) for s in group]
    step = 0
    while step < n_chunks[0]:
        n_active = sum(n > step for n in n_chunks)
        n_steps = min(max(1, limit // n_active), n_chunks[n_active - 1] - step)
        yield n_active, [Chunk(s, i) for i in range(step, step + n_steps) for s in group[:n_active]]
        step += n_steps


def fused_projection(shape: DeltaNetShape, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One weight whose rows give [q | k | v | z | b | a], each in the order of heads.

    Qwen3.5 has four weights; Qwen3-Next has two, whose rows stand key head by key head: q, k, and then v and z of the
    value heads that share it (b and a likewise).
    """
    if "in_proj_qkv.weight" in tensors:
        return torch.cat([tensors[f"in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")])
    heads = shape.k_heads
    shared = shape.v_heads // heads
    widths = (shape.k_dim, shape.k_dim, shared * shape.v_dim, shared * shape.v_dim)
    by_head = tensors["in_proj_qkvz.weight"].unflatten(0, (heads, -1)).split(widths, 1)
    by_head += tensors["in_proj_ba.weight"].unflatten(0, (heads, -1)).split(shared, 1)
    return torch.cat([part.flatten(0, 1) for part in by_head])
