"""The gated delta rule on a GPU: the same chunks of 64 as `mixers/gdn.py`, in Triton.

One kernel does all that needs no state, all chunks and heads at once; another takes each sequence's chunks in order,
with a head's state (a block of its value channels) in registers. A third one takes one token of each sequence, also for
Kimi Delta Attention.

S slices, P prefill rows, n chunks, t = 64, G key heads, H value heads, K key width, V value width, R rows of the state
memory, B decoding sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.mixers.gdn import DeltaRule
from headwater.mixers.gpu import ALIGNED, dense
from headwater.mixers.gpu.norm import unit_queries_keys
from headwater.mixers.gpu.ragged import PRECISION, STAGES, WARPS, Ragged
from headwater.mixers.slices import CHUNK

VALUES = 32  # value channels that a program keeps in registers


@triton.jit
def _decays(g, base, row, length, heads, head):
    """Running sum of g within a chunk, float64: small differences of large sums matter."""
    value = tl.load(g + (base + row) * heads + head, mask=row < length, other=0.0)
    return tl.cumsum(value.to(tl.float64), 0)


@triton.jit
def _solve(
    q, k, g, beta, inverse, attend, slice_n, first_S, length_S, chunk_S, n_heads, n_key_heads, shared,
    width: tl.constexpr, padded: tl.constexpr, t: tl.constexpr,
):  # fmt: skip
    """(I + A)⁻¹ diag(β) and Q Kᵀ ∘ D of one chunk and head.

    Blocks of h rows are inverted for h = 1, 2, 4, ... in turn: [[a, 0], [b, c]]⁻¹ is [[a⁻¹, 0], [−c⁻¹ b a⁻¹, c⁻¹]].
    """
    at, head = tl.program_id(0), tl.program_id(1)
    which = tl.load(slice_n + at)
    offset = (at - tl.load(chunk_S + which)) * t
    base = (tl.load(first_S + which) + offset).to(tl.int64)
    length = tl.load(length_S + which) - offset
    row, channel = tl.arange(0, t), tl.arange(0, padded)
    inside = row < length
    at_key = ((base + row[:, None]) * n_key_heads + head // shared) * width + channel[None, :]
    in_key = inside[:, None] & (channel < width)[None, :]
    k_tK = tl.load(k + at_key, mask=in_key, other=0.0)
    decay = _decays(g, base, row, length, n_heads, head)
    b_t = tl.load(beta + (base + row) * n_heads + head, mask=inside, other=0.0)
    i, j = row[:, None], row[None, :]
    ratio = tl.exp(tl.minimum(decay[:, None] - decay[None, :], 0.0).to(tl.float32))
    dots = tl.dot(k_tK, tl.trans(k_tK), input_precision=PRECISION)
    system = tl.where(i > j, dots * ratio * b_t[:, None], 0.0)
    result = tl.where(i == j, 1.0, 0.0)
    for level in tl.static_range(6):
        half = 1 << level
        is_b = ((i // (2 * half)) == (j // (2 * half))) & ((i // half) % 2 == 1) & ((j // half) % 2 == 0)
        inner = tl.dot(tl.where(is_b, system, 0.0), result, input_precision=PRECISION)
        result -= tl.dot(result, inner, input_precision=PRECISION)
    to = ((at * n_heads + head).to(tl.int64) * t + i) * t + j
    tl.store(inverse + to, result * b_t[None, :])
    q_tK = tl.load(q + at_key, mask=in_key, other=0.0)
    seen = tl.dot(q_tK, tl.trans(k_tK), input_precision=PRECISION)
    tl.store(attend + to, tl.where(i >= j, seen * ratio, 0.0))


@triton.jit
def _advance(
    q, k, v, g, inverse, attend, out, state, first_S, length_S, slot_S, chunk_S, save_n,
    n_heads, n_key_heads, shared, v_row, state_row,
    width: tl.constexpr, padded: tl.constexpr, v_width: tl.constexpr, values: tl.constexpr, t: tl.constexpr,
):  # fmt: skip
    """All chunks of one slice in order, for one head and `values` of its value channels."""
    which, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, padded)
    value = tl.program_id(2) * values + tl.arange(0, values)
    row = tl.arange(0, t)
    first, length = tl.load(first_S + which).to(tl.int64), tl.load(length_S + which)
    slot, chunk = tl.load(slot_S + which).to(tl.int64), tl.load(chunk_S + which).to(tl.int64)
    in_state = (channel < width)[:, None] & (value < v_width)[None, :]
    at_state = head * width * v_width + channel[:, None] * v_width + value[None, :]
    state_KV = tl.load(state + slot * state_row + at_state, mask=in_state, other=0.0)
    for i in range(tl.cdiv(length, t)):
        base, left = first + i * t, length - i * t
        inside = row < left
        at_key = ((base + row[:, None]) * n_key_heads + head // shared) * width + channel[None, :]
        in_key = inside[:, None] & (channel < width)[None, :]
        q_tK = tl.load(q + at_key, mask=in_key, other=0.0)
        k_tK = tl.load(k + at_key, mask=in_key, other=0.0)
        in_value = inside[:, None] & (value < v_width)[None, :]
        v_tV = tl.load(v + (base + row[:, None]) * v_row + head * v_width + value[None, :], mask=in_value, other=0.0)
        at_square = (((chunk + i) * n_heads + head) * t + row[:, None]) * t + row[None, :]
        decay = _decays(g, base, row, left, n_heads, head)
        last = tl.sum(tl.where(row == t - 1, decay, 0.0), 0)
        from_start = tl.exp(decay.to(tl.float32))[:, None]
        to_end = tl.exp((last - decay).to(tl.float32))[:, None]
        known = tl.dot(k_tK * from_start, state_KV, input_precision=PRECISION)
        correction = tl.dot(tl.load(inverse + at_square), v_tV - known, input_precision=PRECISION)
        read = tl.dot(q_tK * from_start, state_KV, input_precision=PRECISION)
        read += tl.dot(tl.load(attend + at_square), correction, input_precision=PRECISION)
        tl.store(out + ((base + row[:, None]) * n_heads + head) * v_width + value[None, :], read, mask=in_value)
        written = tl.dot(tl.trans(k_tK * to_end), correction, input_precision=PRECISION)
        state_KV = state_KV * tl.exp(last.to(tl.float32)) + written
        save = tl.load(save_n + chunk + i).to(tl.int64)
        tl.store(state + save * state_row + at_state, state_KV, mask=in_state & (save + 0 * value[None, :] >= 0))
    tl.store(state + slot * state_row + at_state, state_KV, mask=in_state)


@triton.jit(do_not_specialize_on_alignment=["g", "beta"])
def _decode(
    q, k, v, g, beta, out, state, slot_B, n_heads, shared, qk_row, v_row, g_row, beta_row, state_row, factor,
    width: tl.constexpr, padded: tl.constexpr, v_width: tl.constexpr, values: tl.constexpr, by_channel: tl.constexpr,
):  # fmt: skip
    """One token, whose query and key are normed; g is one a head, or with `by_channel` one a key channel."""
    which, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, padded)
    value = tl.program_id(2) * values + tl.arange(0, values)
    slot = tl.load(slot_B + which).to(tl.int64)
    in_state = (channel < width)[:, None] & (value < v_width)[None, :]
    at_state = slot * state_row + head * width * v_width + channel[:, None] * v_width + value[None, :]
    at_key = which * qk_row + head // shared * width + channel
    q_K = tl.load(q + at_key, mask=channel < width, other=0.0)
    k_K = tl.load(k + at_key, mask=channel < width, other=0.0)
    q_K = q_K * (tl.rsqrt(tl.sum(q_K * q_K, 0) + 1e-6) * factor)
    k_K = k_K * tl.rsqrt(tl.sum(k_K * k_K, 0) + 1e-6)
    v_V = tl.load(v + which * v_row + head * v_width + value, mask=value < v_width, other=0.0)
    at_head = which * n_heads + head
    if by_channel:
        g_K = tl.load(g + which * g_row + head * width + channel, mask=channel < width, other=0.0)
        state_KV = tl.load(state + at_state, mask=in_state, other=0.0) * tl.exp(g_K)[:, None]
    else:
        state_KV = tl.load(state + at_state, mask=in_state, other=0.0) * tl.exp(tl.load(g + which * g_row + head))
    error = (v_V - tl.sum(state_KV * k_K[:, None], 0)) * tl.load(beta + which * beta_row + head)
    state_KV += k_K[:, None] * error[None, :]
    tl.store(state + at_state, state_KV, mask=in_state)
    tl.store(out + at_head * v_width + value, tl.sum(state_KV * q_K[:, None], 0), mask=value < v_width)


class DeltaRuleKernels:
    """The decode kernel of a layer with the delta rule, with its launch."""

    def __init__(self, mixer: DeltaRule[Any]) -> None:
        self.mixer, self.shape = mixer, mixer.shape

    def decode(self, mixed_BC: Tensor, gates_BX: Tensor, state_RHKV: Tensor, slot_B: Tensor) -> Tensor:
        """Process one token of each of B sequences, [B, H, V]; update their slots in place."""
        qk_B2GK, v_BHV = self.mixer.heads(dense(mixed_BC))
        q_BGK, k_BGK = qk_B2GK.unbind(1)
        g_BHX, beta_BH = self.mixer.gates(gates_BX)
        out_BHV = torch.empty_like(v_BHV, memory_format=torch.contiguous_format)
        n_heads, n_key_heads, key_width = v_BHV.shape[1], *q_BGK.shape[1:]
        by_channel = g_BHX.shape[-1] > 1
        _decode[len(slot_B), n_heads, triton.cdiv(v_BHV.shape[2], VALUES)](
            q_BGK, k_BGK, v_BHV, g_BHX, beta_BH, out_BHV, state_RHKV, slot_B, n_heads, n_heads // n_key_heads,
            q_BGK.stride(0), v_BHV.stride(0), g_BHX.stride(0), beta_BH.stride(0), state_RHKV.stride(0),
            key_width**-0.5, by_channel=by_channel, **widths(key_width, v_BHV.shape[2]),
        )  # fmt: skip
        return out_BHV

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normed and scaled queries, normed keys, [N, G, K] each, and values [N, H, V], rows strided."""
        qk_N2GK, v_NHV = self.mixer.heads(mixed)
        in_rows = v_NHV.data_ptr() % ALIGNED == 0 == v_NHV.stride(0) * v_NHV.element_size() % ALIGNED
        return *unit_queries_keys(qk_N2GK), v_NHV if in_rows else dense(v_NHV)


def widths(key_width: int, value_width: int) -> dict[str, int]:
    """Return the compile-time widths of a kernel."""
    padded = max(16, triton.next_power_of_2(key_width))
    return {"width": key_width, "padded": padded, "v_width": value_width, "values": VALUES}


class GatedDeltaNetKernels(DeltaRuleKernels):
    """The kernels of one `GatedDeltaNet` layer, with their launches."""

    def prefill(self, mixed_PC: Tensor, gates_P2H: Tensor, state_RHKV: Tensor, ragged: Ragged) -> Tensor:
        """Return the outputs of all slices' rows, [P, H, V]; write their slots and the rows of saves."""
        s = self.shape
        q_PGK, k_PGK, v_PHV = self._split(mixed_PC)
        g_PH1, beta_PH = map(dense, self.mixer.gates(gates_P2H))
        n_chunks = len(ragged.slice_n)
        inverse, attend = mixed_PC.new_empty(2, n_chunks, s.v_heads, CHUNK, CHUNK)
        heads, of_kernel = (s.v_heads, s.k_heads, s.v_heads // s.k_heads), widths(s.k_dim, s.v_dim)
        _solve[n_chunks, s.v_heads](
            q_PGK, k_PGK, g_PH1, beta_PH, inverse, attend, ragged.slice_n, ragged.first_S, ragged.length_S,
            ragged.chunk_S, *heads, width=of_kernel["width"], padded=of_kernel["padded"], t=CHUNK,
        )  # fmt: skip
        out_PHV = torch.empty_like(v_PHV, memory_format=torch.contiguous_format)
        _advance[len(ragged.first_S), s.v_heads, triton.cdiv(s.v_dim, VALUES)](
            q_PGK, k_PGK, v_PHV, g_PH1, inverse, attend, out_PHV, state_RHKV, ragged.first_S, ragged.length_S,
            ragged.slot_S, ragged.chunk_S, ragged.save_n, *heads, v_PHV.stride(0), state_RHKV.stride(0),
            t=CHUNK, num_stages=STAGES, num_warps=WARPS, **of_kernel,
        )  # fmt: skip
        return out_PHV
