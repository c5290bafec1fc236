"""Kimi Delta Attention on a GPU: what chunks contribute is made as on the CPU, all at once; states move on in Triton.

A program takes one sequence's chunks in order, with a head's state (a block of its value channels) in registers.

S slices, P prefill rows, n chunks, t = 64, H heads, K key width, V value width, M = n·H, R rows of the state memory,
B decoding sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headwater.mixers.activations import inverse_l2
from headwater.mixers.batch import CHUNK
from headwater.mixers.gpu.ragged import STAGES, Ragged
from headwater.mixers.kda import KimiDeltaAttention, prepare

VALUES = 32  # value channels that a program keeps in registers


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
        known = tl.dot(tl.load(at_read + t * width, mask=in_key, other=0.0), state_KV, input_precision="ieee")
        given = tl.load(value + (m * t + row[:, None]) * v_width + v[None, :], mask=in_value, other=0.0)
        correction = tl.dot(tl.load(inverse + at_square), given - known, input_precision="ieee")
        result = tl.dot(tl.load(at_read, mask=in_key, other=0.0), state_KV, input_precision="ieee")
        result += tl.dot(tl.load(attend + at_square), correction, input_precision="ieee")
        tl.store(out + (m * t + row[:, None]) * v_width + v[None, :], result, mask=in_value)
        to_end = tl.load(write + (m * t + row[:, None]) * width + channel[None, :], mask=in_key, other=0.0)
        kept = tl.load(decay + m * width + channel, mask=channel < width, other=0.0)
        state_KV = state_KV * kept[:, None] + tl.dot(tl.trans(to_end), correction, input_precision="ieee")
        save = tl.load(save_n + chunk + i).to(tl.int64) + 0 * v[None, :]
        tl.store(state + save * state_row + at_state, state_KV, mask=in_state & (save >= 0))
    tl.store(state + slot * state_row + at_state, state_KV, mask=in_state)


@triton.jit
def _decode(
    q, k, v, g, beta, out, state, slot_B, heads, state_row,
    width: tl.constexpr, padded: tl.constexpr, v_width: tl.constexpr, values: tl.constexpr,
):  # fmt: skip
    which, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, padded)
    at_value = tl.program_id(2) * values + tl.arange(0, values)
    slot = tl.load(slot_B + which).to(tl.int64)
    in_state = (channel < width)[:, None] & (at_value < v_width)[None, :]
    at_state = slot * state_row + head * width * v_width + channel[:, None] * v_width + at_value[None, :]
    at_key, in_key = (which * heads + head) * width + channel, channel < width
    q_K = tl.load(q + at_key, mask=in_key, other=0.0)
    k_K = tl.load(k + at_key, mask=in_key, other=0.0)
    decay_K = tl.exp(tl.load(g + at_key, mask=in_key, other=0.0))
    v_V = tl.load(v + (which * heads + head) * v_width + at_value, mask=at_value < v_width, other=0.0)
    state_KV = tl.load(state + at_state, mask=in_state, other=0.0) * decay_K[:, None]
    error = (v_V - tl.sum(state_KV * k_K[:, None], 0)) * tl.load(beta + which * heads + head)
    state_KV += k_K[:, None] * error[None, :]
    tl.store(state + at_state, state_KV, mask=in_state)
    read = tl.sum(state_KV * q_K[:, None], 0)
    tl.store(out + (which * heads + head) * v_width + at_value, read, mask=at_value < v_width)


class KimiDeltaAttentionKernels:
    """The kernels of one `KimiDeltaAttention` layer, with their launches."""

    def __init__(self, mixer: KimiDeltaAttention) -> None:
        self.shape = mixer.shape

    def prefill(
        self, mixed_PC: torch.Tensor, gates_PX: torch.Tensor, state_RHKV: torch.Tensor, ragged: Ragged
    ) -> torch.Tensor:
        """Return the outputs of all slices' rows, [P, H, V]; write their slots and the rows of saves."""
        s = self.shape
        row_nt = ragged.rows_of_chunks
        inside_nt1 = (row_nt >= 0).unsqueeze(-1)
        mixed_ntC, gates_ntX = (t[row_nt.clamp_min(0)] * inside_nt1 for t in (mixed_PC, gates_PX))
        qkv = mixed_ntC.unflatten(-1, (3, s.heads, s.head_dim))
        g, beta = gates_ntX.split((s.width, s.heads), -1)
        prepared = prepare(qkv[..., :2, :, :], qkv[..., 2, :, :], g.unflatten(-1, (s.heads, s.head_dim)), beta)
        parts = (
            prepared.read_MRK, prepared.value_MtV, prepared.inverse_Mtt, prepared.attend_Mtt, prepared.write_MtK,
            prepared.decay_MX1,
        )  # fmt: skip
        out_nHtV = mixed_PC.new_empty(len(row_nt), s.heads, CHUNK, s.head_dim)
        _advance[len(ragged.first_S), s.heads, triton.cdiv(s.head_dim, VALUES)](
            *(part.contiguous() for part in parts), out_nHtV, state_RHKV, ragged.length_S, ragged.slot_S,
            ragged.chunk_S, ragged.save_n, s.heads, state_RHKV.stride(0), t=CHUNK, num_stages=STAGES,
            **self._widths(),
        )  # fmt: skip
        return out_nHtV.transpose(1, 2)[row_nt >= 0]

    def decode(
        self, mixed_BC: torch.Tensor, gates_BX: torch.Tensor, state_RHKV: torch.Tensor, slot_B: torch.Tensor
    ) -> torch.Tensor:
        """One token of each of B sequences: [B, H, V]; their slots move on in place."""
        s = self.shape
        qkv = mixed_BC.unflatten(-1, (3, s.heads, s.head_dim))
        scale_B2H1 = inverse_l2(qkv[:, :2])
        scale_B2H1[:, 0] *= s.head_dim**-0.5
        q_BHK, k_BHK = (t.contiguous() for t in (qkv[:, :2] * scale_B2H1).unbind(1))
        g_BX, beta_BH = (t.contiguous() for t in gates_BX.split((s.width, s.heads), -1))
        out_BHV = mixed_BC.new_empty(len(slot_B), s.heads, s.head_dim)
        _decode[len(slot_B), s.heads, triton.cdiv(s.head_dim, VALUES)](
            q_BHK, k_BHK, qkv[:, 2].contiguous(), g_BX, beta_BH, out_BHV, state_RHKV, slot_B, s.heads,
            state_RHKV.stride(0), **self._widths(),
        )  # fmt: skip
        return out_BHV

    def _widths(self) -> dict[str, int]:
        width = self.shape.head_dim
        return {"width": width, "padded": max(16, triton.next_power_of_2(width)), "v_width": width, "values": VALUES}
