"""Mamba-2 on a GPU: the same chunks of 64 as `mixers/mamba2.py`, in Triton, and one token of many sequences.

A program takes one sequence's chunks in order, with a block of a head's state [N, P] in registers.

S slices, H heads, G groups, N state width, P channels a head, R rows of the state memory, B decoding sequences,
Y rows of a step: prefill's or decode's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headwater.mixers.gpu import dense
from headwater.mixers.gpu.ragged import PRECISION, STAGES, WARPS, Ragged
from headwater.mixers.mamba2 import StateSpaceDual
from headwater.mixers.slices import CHUNK

CHANNELS = 32  # of a head that a program keeps in registers


@triton.jit
def _advance(
    mixed, dt, rate, skip, out, state, first_S, length_S, slot_S, chunk_S, save_n,
    heads, shared, mixed_row, dt_row, b_at, c_at, state_row,
    width: tl.constexpr, padded: tl.constexpr, n_channels: tl.constexpr, channels: tl.constexpr, t: tl.constexpr,
):  # fmt: skip
    """All chunks of one slice in order, for one head and `channels` of its channels."""
    which, head = tl.program_id(0), tl.program_id(1)
    n, row = tl.arange(0, padded), tl.arange(0, t)
    channel = tl.program_id(2) * channels + tl.arange(0, channels)
    first, length = tl.load(first_S + which).to(tl.int64), tl.load(length_S + which)
    slot, chunk = tl.load(slot_S + which).to(tl.int64), tl.load(chunk_S + which)
    a, d = tl.load(rate + head).to(tl.float64), tl.load(skip + head)
    in_state = (n < width)[:, None] & (channel < n_channels)[None, :]
    at_state = head * width * n_channels + n[:, None] * n_channels + channel[None, :]
    state_NP = tl.load(state + slot * state_row + at_state, mask=in_state, other=0.0)
    for i in range(tl.cdiv(length, t)):
        base, left = first + i * t, length - i * t
        inside = row < left
        in_b = inside[:, None] & (n < width)[None, :]
        at_row = (base + row[:, None]) * mixed_row
        at_group = (head // shared) * width + n[None, :]
        b_tN = tl.load(mixed + at_row + b_at + at_group, mask=in_b, other=0.0)
        c_tN = tl.load(mixed + at_row + c_at + at_group, mask=in_b, other=0.0)
        in_x = inside[:, None] & (channel < n_channels)[None, :]
        x_tP = tl.load(mixed + at_row + head * n_channels + channel[None, :], mask=in_x, other=0.0)
        dt_t = tl.load(dt + (base + row) * dt_row + head, mask=inside, other=0.0)
        decay = tl.cumsum(dt_t.to(tl.float64) * a, 0)  # float64: small differences of large sums matter
        last = tl.sum(tl.where(row == t - 1, decay, 0.0), 0)
        taken = x_tP * dt_t[:, None]
        ratio = tl.exp(tl.minimum(decay[:, None] - decay[None, :], 0.0).to(tl.float32))
        dots = tl.dot(c_tN, tl.trans(b_tN), input_precision=PRECISION)
        attend = tl.where(row[:, None] >= row[None, :], dots * ratio, 0.0)
        read = tl.dot(c_tN * tl.exp(decay.to(tl.float32))[:, None], state_NP, input_precision=PRECISION)
        read += tl.dot(attend, taken, input_precision=PRECISION) + d * x_tP
        tl.store(out + ((base + row[:, None]) * heads + head) * n_channels + channel[None, :], read, mask=in_x)
        to_end = tl.exp((last - decay).to(tl.float32))
        written = tl.dot(tl.trans(b_tN * to_end[:, None]), taken, input_precision=PRECISION)
        state_NP = state_NP * tl.exp(last.to(tl.float32)) + written
        save = tl.load(save_n + chunk + i).to(tl.int64) + 0 * channel[None, :]
        tl.store(state + save * state_row + at_state, state_NP, mask=in_state & (save >= 0))
    tl.store(state + slot * state_row + at_state, state_NP, mask=in_state)


@triton.jit
def _decode(
    mixed, dt, rate, skip, out, state, slot_B, heads, shared, mixed_row, dt_row, b_at, c_at, state_row,
    width: tl.constexpr, padded: tl.constexpr, n_channels: tl.constexpr, channels: tl.constexpr,
):  # fmt: skip
    which, head = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, padded)
    channel = tl.program_id(2) * channels + tl.arange(0, channels)
    slot = tl.load(slot_B + which).to(tl.int64)
    in_state = (n < width)[:, None] & (channel < n_channels)[None, :]
    at_state = slot * state_row + head * width * n_channels + n[:, None] * n_channels + channel[None, :]
    at_group = which * mixed_row + (head // shared) * width + n
    b_N = tl.load(mixed + at_group + b_at, mask=n < width, other=0.0)
    c_N = tl.load(mixed + at_group + c_at, mask=n < width, other=0.0)
    x_P = tl.load(mixed + which * mixed_row + head * n_channels + channel, mask=channel < n_channels, other=0.0)
    step = tl.load(dt + which * dt_row + head)
    state_NP = tl.load(state + at_state, mask=in_state, other=0.0) * tl.exp(step * tl.load(rate + head))
    state_NP += b_N[:, None] * (step * x_P)[None, :]
    tl.store(state + at_state, state_NP, mask=in_state)
    read = tl.sum(state_NP * c_N[:, None], 0) + tl.load(skip + head) * x_P
    tl.store(out + (which * heads + head) * n_channels + channel, read, mask=channel < n_channels)


class StateSpaceDualKernels:
    """The kernels of one `StateSpaceDual` layer, with their launches."""

    def __init__(self, mixer: StateSpaceDual) -> None:
        self.shape, self.rate_H, self.skip_H = mixer.shape, mixer.rate_H, mixer.skip_H

    def prefill(self, mixed_YC: Tensor, dt_YH: Tensor, state_RHNP: Tensor, ragged: Ragged) -> Tensor:
        """Return the outputs of all slices' rows, [Y, H, P]; write their slots and the rows of saves."""
        given, strides, widths, out_YHP = self._arguments(mixed_YC, dt_YH, state_RHNP)
        _advance[len(ragged.first_S), self.shape.heads, triton.cdiv(self.shape.head_dim, CHANNELS)](
            *given, ragged.first_S, ragged.length_S, ragged.slot_S, ragged.chunk_S, ragged.save_n, *strides,
            t=CHUNK, num_stages=STAGES, num_warps=WARPS, **widths,
        )  # fmt: skip
        return out_YHP

    def decode(self, mixed_YC: Tensor, dt_YH: Tensor, state_RHNP: Tensor, slot_B: Tensor) -> Tensor:
        """Process one token of each of B sequences, [Y, H, P]; update their slots in place."""
        given, strides, widths, out_YHP = self._arguments(mixed_YC, dt_YH, state_RHNP)
        blocks = triton.cdiv(self.shape.head_dim, CHANNELS)
        _decode[len(slot_B), self.shape.heads, blocks](*given, slot_B, *strides, **widths)
        return out_YHP

    def _arguments(
        self, mixed_YC: Tensor, dt_YH: Tensor, state_RHNP: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, int], Tensor]:
        """Return the arguments that both kernels take: tensors, sizes and strides, widths; and the output among them.

        Rows of channels are [x | B | C].
        """
        s, mixed_YC, dt_YH = self.shape, dense(mixed_YC), dense(dt_YH)
        out_YHP = mixed_YC.new_empty(len(mixed_YC), s.heads, s.head_dim)
        at_c = s.inner + s.groups * s.state
        rows = (mixed_YC.stride(0), dt_YH.stride(0), s.inner, at_c, state_RHNP.stride(0))
        padded = max(16, triton.next_power_of_2(s.state))
        widths = {"width": s.state, "padded": padded, "n_channels": s.head_dim, "channels": CHANNELS}
        given = (mixed_YC, dt_YH, self.rate_H, self.skip_H, out_YHP, state_RHNP)
        return given, (s.heads, s.heads // s.groups, *rows), widths, out_YHP
