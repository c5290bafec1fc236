"""The slices of a step as Triton kernels read them, and the short causal convolution over them.

S slices, P prefill rows, n chunks of 64 tokens (of all slices, one after the other), C channels, W taps, w = W − 1,
R rows of the state memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.mixers.slices import CHUNK, Round, Slice

ROWS, CHANNELS = 32, 64  # of a tile of the convolution
NO_ROW = -1
# Pipeline stages of a kernel's loop over chunks: the next chunk is not loaded ahead. Triton's default of three would
# take 230 to 295 KB of shared memory a program at heads of 128 channels, more than any card has; one takes 41 to 98 KB.
STAGES = 1
WARPS = 4  # of such a program
# Float32 products on tensor cores, from parts of fewer bits (Ootomo and Yokota 2022, "Recovering single precision
# accuracy from Tensor Cores").
PRECISION = tl.constexpr("tf32x3")


@dataclass(frozen=True)
class Ragged:
    """Rows, states and chunks of each slice: int32 tensors on the device, built once a step."""

    first_S: Tensor  # first row in the step
    length_S: Tensor
    slot_S: Tensor  # row of the state memory
    chunk_S: Tensor  # first chunk
    slice_P: Tensor  # slice of each row
    slice_n: Tensor  # slice of each chunk
    save_n: Tensor  # row of the state memory that also receives the state after a chunk, or -1

    @property
    def rows_of_chunks(self) -> Tensor:
        """Row of each token of each chunk, int64 [n, 64]; -1 after the last token of a slice. Rows ascend."""
        index_n = torch.arange(len(self.slice_n), device=self.slice_n.device) - self.chunk_S[self.slice_n]
        index_nt = torch.arange(CHUNK, device=self.first_S.device) + CHUNK * index_n.unsqueeze(1)
        inside_nt = index_nt < self.length_S[self.slice_n].unsqueeze(1)
        return torch.where(inside_nt, self.first_S[self.slice_n].unsqueeze(1) + index_nt, NO_ROW).long()

    @classmethod
    def of(cls, slices: Sequence[Slice], device: torch.device | str) -> Ragged:
        """Copy positions and rows to the device. Raises ValueError if two saves of a slice have the same position."""
        counts = [-(-s.length // CHUNK) for s in slices]
        saves: list[int] = []
        for s, count in zip(slices, counts, strict=True):
            at = dict(s.saves)
            if len(at) < len(s.saves):
                raise ValueError(f"{len(s.saves)} saves at {len(at)} positions of a slice")
            saves += [at.get(min(s.start + (i + 1) * CHUNK, s.end), NO_ROW) for i in range(count)]

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(
            first_S=tensor([s.first for s in slices]),
            length_S=tensor([s.length for s in slices]),
            slot_S=tensor([s.slot for s in slices]),
            chunk_S=tensor([sum(counts[:i]) for i in range(len(counts))]),
            slice_P=tensor([i for i, s in enumerate(slices) for _ in range(s.length)]),
            slice_n=tensor([i for i, count in enumerate(counts) for _ in range(count)]),
            save_n=tensor(saves),
        )


@lru_cache(maxsize=8)
def ragged_of(together: Round) -> Ragged:
    """Return the slices of a round, its rows one after the other; all layers of a step share the result."""
    firsts = accumulate((s.length for s in together.slices), initial=0)
    slices = [replace(s, first=first) for s, first in zip(together.slices, firsts, strict=False)]
    return Ragged.of(slices, together.device)


@triton.jit
def _input(x, state, row, first, slot, channel, mask, x_row, state_row, channel_step, input_step, before: tl.constexpr):
    """Load the inputs at `row`: from this step, or from the state if the row is before the slice's first one."""
    here = row >= first
    now = tl.load(x + row * x_row + channel, mask=mask & here, other=0.0).to(tl.float32)
    then = tl.load(
        state + slot * state_row + channel * channel_step + (row - first + before) * input_step,
        mask=mask & (row < first),
        other=0.0,
    )
    return tl.where(here, now, then.to(tl.float32))


@triton.jit(do_not_specialize=["n_rows"])
def _convolve(
    x, state, weight, bias, out, slice_P, first_S, slot_S, n_rows,
    n_channels, x_row, state_row, channel_step, input_step,
    before: tl.constexpr, has_bias: tl.constexpr, silu: tl.constexpr, rows: tl.constexpr, channels: tl.constexpr,
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
        total += w * _input(
            x, state, at, first, slot, channel[None, :], mask, x_row, state_row, channel_step, input_step, before
        )
    if has_bias:
        total += tl.load(bias + channel, mask=channel < n_channels, other=0.0)[None, :]
    if silu:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + row[:, None].to(tl.int64) * n_channels + channel[None, :], total, mask=mask)


@triton.jit
def _keep_tail(
    x, state, slice_n, first_S, length_S, slot_S, chunk_S, save_n,
    n_channels, x_row, state_row, channel_step, input_step,
    before: tl.constexpr, chunk: tl.constexpr, channels: tl.constexpr,
):  # fmt: skip
    """Write the last inputs to the state memory after each chunk with a save and after the last chunk of each slice."""
    at = tl.program_id(0)
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    mask = channel < n_channels
    which = tl.load(slice_n + at)
    first, slot = tl.load(first_S + which).to(tl.int64), tl.load(slot_S + which).to(tl.int64)
    length = tl.load(length_S + which)
    end = tl.minimum((at - tl.load(chunk_S + which) + 1) * chunk, length)
    save = tl.load(save_n + at).to(tl.int64) + 0 * channel  # as vectors: masked operands must be vectors
    row = first + end - before + 0 * channel
    is_last = end + 0 * channel == length
    for i in tl.static_range(before):
        value = _input(
            x, state, row + i, first, slot, channel, mask, x_row, state_row, channel_step, input_step, before
        )
        value = value.to(state.dtype.element_ty)
        tl.store(state + save * state_row + channel * channel_step + i * input_step, value, mask=mask & (save >= 0))
        tl.store(state + slot * state_row + channel * channel_step + i * input_step, value, mask=mask & is_last)


def convolve(
    x_PC: Tensor, weight_WC: Tensor, bias_C: Tensor | None, silu: bool, state_RCw: Tensor, ragged: Ragged
) -> Tensor:
    """Return the convolution, or silu of it, of slices' rows, [P, C] float32; update states and write saves.

    Rows of x may be strided, each is contiguous; the state may have any strides.
    """
    n_rows, n_channels = len(ragged.slice_P), weight_WC.shape[1]
    before = weight_WC.shape[0] - 1
    out_PC = torch.empty(n_rows, n_channels, dtype=torch.float32, device=x_PC.device)
    columns = triton.cdiv(n_channels, CHANNELS)
    strides = (n_channels, x_PC.stride(0), *state_RCw.stride())
    _convolve[triton.cdiv(n_rows, ROWS), columns](
        x_PC, state_RCw, weight_WC, weight_WC if bias_C is None else bias_C, out_PC,
        ragged.slice_P, ragged.first_S, ragged.slot_S, n_rows, *strides,
        before=before, has_bias=bias_C is not None, silu=silu, rows=ROWS, channels=CHANNELS,
    )  # fmt: skip
    _keep_tail[len(ragged.slice_n), columns](
        x_PC, state_RCw, ragged.slice_n, ragged.first_S, ragged.length_S, ragged.slot_S, ragged.chunk_S, ragged.save_n,
        *strides, before=before, chunk=CHUNK, channels=CHANNELS,
    )  # fmt: skip
    return out_PC
