"""The short causal convolution over ragged slices, and the inputs that come before what follows.

P prefill rows, C channels, W taps, w = W − 1, R rows of the state memory, n chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headwater.mixers.chunks import CHUNK
from headwater.mixers.gpu.ragged import Ragged

ROWS, CHANNELS = 32, 64  # of a tile


@triton.jit
def _input(x, state, row, first, slot, channel, mask, x_row, state_row, before: tl.constexpr):
    """Inputs at `row`: of this step, or of the state where the row is before the slice's first one."""
    here = row >= first
    now = tl.load(x + row * x_row + channel, mask=mask & here, other=0.0).to(tl.float32)
    then = tl.load(
        state + slot * state_row + channel * before + (row - first + before), mask=mask & (row < first), other=0.0
    )
    return tl.where(here, now, then.to(tl.float32))


@triton.jit
def _convolve(
    x, state, weight, bias, out, slice_P, first_S, slot_S, n_rows, n_channels, x_row, state_row,
    before: tl.constexpr, has_bias: tl.constexpr, rows: tl.constexpr, channels: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    inside = row < n_rows
    which = tl.load(slice_P + row, mask=inside, other=0)
    first = tl.load(first_S + which)[:, None].to(tl.int64)
    slot = tl.load(slot_S + which)[:, None].to(tl.int64)
    mask = inside[:, None] & (channel < n_channels)[None, :]
    total = tl.zeros((rows, channels), tl.float32)
    for tap in tl.static_range(before + 1):
        w = tl.load(weight + tap * n_channels + channel, mask=channel < n_channels, other=0.0)[None, :]
        at = row[:, None].to(tl.int64) - before + tap
        total += w * _input(x, state, at, first, slot, channel[None, :], mask, x_row, state_row, before)
    if has_bias:
        total += tl.load(bias + channel, mask=channel < n_channels, other=0.0)[None, :]
    total = total / (1.0 + tl.exp(-total))
    tl.store(out + row[:, None].to(tl.int64) * n_channels + channel[None, :], total, mask=mask)


@triton.jit
def _keep_tail(
    x, state, slice_n, first_S, length_S, slot_S, chunk_S, save_n, n_channels, x_row, state_row,
    before: tl.constexpr, chunk: tl.constexpr, channels: tl.constexpr,
):  # fmt: skip
    """After each chunk that is to be saved, and after each slice's last one, the last inputs go to the state memory."""
    at = tl.program_id(0)
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    mask = channel < n_channels
    which = tl.load(slice_n + at)
    first, slot = tl.load(first_S + which).to(tl.int64), tl.load(slot_S + which).to(tl.int64)
    length = tl.load(length_S + which)
    end = tl.minimum((at - tl.load(chunk_S + which) + 1) * chunk, length)
    save = tl.load(save_n + at).to(tl.int64) + 0 * channel  # as vectors: what is masked is one, too
    row = first + end - before + 0 * channel
    is_last = end + 0 * channel == length
    for i in tl.static_range(before):
        value = _input(x, state, row + i, first, slot, channel, mask, x_row, state_row, before)
        value = value.to(state.dtype.element_ty)
        tl.store(state + save * state_row + channel * before + i, value, mask=mask & (save >= 0))
        tl.store(state + slot * state_row + channel * before + i, value, mask=mask & is_last)


def convolve(
    x_PC: torch.Tensor, weight_WC: torch.Tensor, bias_C: torch.Tensor | None, state_RCw: torch.Tensor, ragged: Ragged
) -> torch.Tensor:
    """silu of the convolution of all slices' rows, [P, C] float32; the state memory moves on, saves are written.

    Rows of x and of the state may be strided, each is contiguous.
    """
    n_rows, n_channels = len(ragged.slice_P), weight_WC.shape[1]
    before = weight_WC.shape[0] - 1
    out_PC = torch.empty(n_rows, n_channels, dtype=torch.float32, device=x_PC.device)
    columns = triton.cdiv(n_channels, CHANNELS)
    strides = (n_channels, x_PC.stride(0), state_RCw.stride(0))
    _convolve[triton.cdiv(n_rows, ROWS), columns](
        x_PC, state_RCw, weight_WC, weight_WC if bias_C is None else bias_C, out_PC,
        ragged.slice_P, ragged.first_S, ragged.slot_S, n_rows, *strides,
        before=before, has_bias=bias_C is not None, rows=ROWS, channels=CHANNELS,
    )  # fmt: skip
    _keep_tail[len(ragged.slice_n), columns](
        x_PC, state_RCw, ragged.slice_n, ragged.first_S, ragged.length_S, ragged.slot_S, ragged.chunk_S, ragged.save_n,
        *strides, before=before, chunk=CHUNK, channels=CHANNELS,
    )  # fmt: skip
    return out_PC
