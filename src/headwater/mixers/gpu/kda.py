"""Kimi Delta Attention on a GPU: what chunks contribute is made as on the CPU, all at once; states move on in Triton.

A program takes one sequence's chunks in order, with a head's state (a block of its value channels) in registers.

S slices, P prefill rows, n chunks, t = 64, H heads, K key width, V value width, M = n·H, R rows of the state memory,
B decoding sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headwater.mixers.gdn import Chunks
from headwater.mixers.gpu.gdn import VALUES, DeltaRuleKernels, widths
from headwater.mixers.gpu.ragged import NO_ROW, PRECISION, STAGES, WARPS, Ragged
from headwater.mixers.slices import CHUNK

CHUNK_BATCH = 16  # chunks that are prepared at once: torch's batched products have other bits at other numbers


@triton.jit
def _advance(
    read, value, inverse, attend, write, decay, out, state, length_S, slot_S, chunk_S, save_n, heads, state_row,
    width: tl.constexpr, padded: tl.constexpr, v_width: tl.constexpr, values: tl.constexpr, t: tl.constexpr,
):  # fmt: skip
    """E = (I + A)⁻¹ (β V − (β e^G K) S); O = (e^G Q) S + attend E; S ← e^(G_64) S + (e^(G_64 − G) K)ᵀ E."""
    which, head = tl.program_id(0), tl.program_id(1)
    row, channel = tl.arange(0, t), tl.arange(0, padded)
    v = tl.program_id(2) * values + tl.arange(0, values)
    slot, chunk = tl.load(slot_S + which).to(tl.int64), tl.load(chunk_S + which).to(tl.int64)
    in_state = (channel < width)[:, None] & (v < v_width)[None, :]
    at_state = head * width * v_width + channel[:, None] * v_width + v[None, :]
    in_key = (channel < width)[None, :] & (row >= 0)[:, None]
    in_value = (v < v_width)[None, :] & (row >= 0)[:, None]
    state_KV = tl.load(state + slot * state_row + at_state, mask=in_state, other=0.0)
    for i in range(tl.cdiv(tl.load(length_S + which), t)):
        m = (chunk + i) * heads + head
        at_read = read + (2 * m * t + row[:, None]) * width + channel[None, :]
        at_square = (m * t + row[:, None]) * t + row[None, :]
        known = tl.dot(tl.load(at_read + t * width, mask=in_key, other=0.0), state_KV, input_precision=PRECISION)
        given = tl.load(value + (m * t + row[:, None]) * v_width + v[None, :], mask=in_value, other=0.0)
        correction = tl.dot(tl.load(inverse + at_square), given - known, input_precision=PRECISION)
        result = tl.dot(tl.load(at_read, mask=in_key, other=0.0), state_KV, input_precision=PRECISION)
        result += tl.dot(tl.load(attend + at_square), correction, input_precision=PRECISION)
        tl.store(out + (m * t + row[:, None]) * v_width + v[None, :], result, mask=in_value)
        to_end = tl.load(write + (m * t + row[:, None]) * width + channel[None, :], mask=in_key, other=0.0)
        kept = tl.load(decay + m * width + channel, mask=channel < width, other=0.0)
        state_KV = state_KV * kept[:, None] + tl.dot(tl.trans(to_end), correction, input_precision=PRECISION)
        save = tl.load(save_n + chunk + i).to(tl.int64) + 0 * v[None, :]
        tl.store(state + save * state_row + at_state, state_KV, mask=in_state & (save >= 0))
    tl.store(state + slot * state_row + at_state, state_KV, mask=in_state)


class KimiDeltaAttentionKernels(DeltaRuleKernels):
    """The kernels of one `KimiDeltaAttention` layer, with their launches."""

    def prefill(self, mixed_PC: Tensor, gates_PX: Tensor, state_RHKV: Tensor, ragged: Ragged) -> Tensor:
        """Return the outputs of all slices' rows, [P, H, V]; write their slots and the rows of saves."""
        s = self.shape
        row_nt = ragged.rows_of_chunks
        parts = zip(
            *(self._prepared(mixed_PC, gates_PX, some_nt) for some_nt in row_nt.split(CHUNK_BATCH)), strict=True
        )
        out_nHtV = mixed_PC.new_empty(len(row_nt), s.heads, CHUNK, s.head_dim)
        _advance[len(ragged.first_S), s.heads, triton.cdiv(s.head_dim, VALUES)](
            *(torch.cat(part) for part in parts), out_nHtV, state_RHKV, ragged.length_S, ragged.slot_S,
            ragged.chunk_S, ragged.save_n, s.heads, state_RHKV.stride(0), t=CHUNK, num_stages=STAGES, num_warps=WARPS,
            **widths(s.head_dim, s.head_dim),
        )  # fmt: skip
        return out_nHtV.transpose(1, 2)[row_nt >= 0]

    def _prepared(self, mixed_PC: Tensor, gates_PX: Tensor, row_nt: Tensor) -> tuple[Tensor, ...]:
        """Return what CHUNK_BATCH chunks at most contribute; their number is filled up with zeros."""
        filled_nt = F.pad(row_nt, (0, 0, 0, CHUNK_BATCH - len(row_nt)), value=NO_ROW)
        inside_nt1 = (filled_nt >= 0).unsqueeze(-1)
        all_of = (t[filled_nt.clamp_min(0)] * inside_nt1 for t in (mixed_PC, gates_PX))
        chunks = self.mixer.prepare(*all_of)
        assert isinstance(chunks, Chunks)
        parts = (
            chunks.read_MRK, chunks.value_MtV, chunks.inverse_Mtt, chunks.attend_Mtt, chunks.write_MtK,
            chunks.decay_MX1,
        )  # fmt: skip
        return tuple(part[: len(row_nt) * self.shape.heads] for part in parts)
