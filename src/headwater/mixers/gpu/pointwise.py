"""Activations, and the convolution of one token, in Triton: a kernel each, where torch takes five to fourteen.

B decoding sequences, C channels, W taps, w = W − 1, R rows of the state memory, X any shape.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of a program
CHANNELS = 128  # of a program that convolves
GATES = 128  # of a program


@triton.jit
def activated(x, kind: tl.constexpr):
    """Return the sigmoid, silu or softplus of float32 elements."""
    if kind == "sigmoid":
        y = 1.0 / (1.0 + tl.exp(-x))
    elif kind == "silu":
        y = x / (1.0 + tl.exp(-x))
    else:  # max(x, 0) + log(1 + e), in which e is not rounded away next to 1
        e = tl.exp(-tl.abs(x))
        u = 1.0 + e
        y = tl.maximum(x, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return y


@triton.jit
def _activate(x, out, n_elements, columns, x_row, kind: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < n_elements
    value = tl.load(x + at // columns * x_row + at % columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, activated(value, kind).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _convolve_token(
    x, state, weight, bias, out, slot_B, n_channels, x_row, state_row, channel_step, input_step,
    before: tl.constexpr, has_bias: tl.constexpr, silu: tl.constexpr, channels: tl.constexpr,
):  # fmt: skip
    """Convolve one sequence's token, and move the stored inputs up by one."""
    which = tl.program_id(0)
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    mask = channel < n_channels
    kept = state + tl.load(slot_B + which).to(tl.int64) * state_row + channel * channel_step
    now = tl.load(x + which * x_row + channel, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros((channels,), tl.float32)
    for tap in tl.static_range(before):
        w = tl.load(weight + tap * n_channels + channel, mask=mask, other=0.0)
        total += w * tl.load(kept + tap * input_step, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(weight + before * n_channels + channel, mask=mask, other=0.0) * now
    if has_bias:
        total += tl.load(bias + channel, mask=mask, other=0.0)
    for tap in tl.static_range(before - 1):
        tl.store(kept + tap * input_step, tl.load(kept + (tap + 1) * input_step, mask=mask), mask=mask)
    if before > 0:
        tl.store(kept + (before - 1) * input_step, now.to(state.dtype.element_ty), mask=mask)
    if silu:
        total = activated(total, "silu")
    tl.store(out + which * n_channels + channel, total, mask=mask)


@triton.jit
def _delta_gates(a, b, dt_bias, decay, strength, out, n_elements, heads, row, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n_elements
    which, head = (at // heads).to(tl.int64), at % heads
    dt = tl.load(a + which * row + head, mask=inside, other=0.0).to(tl.float32)
    dt += tl.load(dt_bias + head, mask=inside, other=0.0)
    g = activated(dt, "softplus") * tl.load(decay + head, mask=inside, other=0.0)
    beta = activated(tl.load(b + which * row + head, mask=inside, other=0.0).to(tl.float32), "sigmoid")
    tl.store(out + which * 2 * heads + head, g, mask=inside)
    tl.store(out + (which * 2 + 1) * heads + head, beta * strength, mask=inside)


@triton.jit
def _open(x, gate, n_elements, width, heads, gate_row, gate_head, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < n_elements
    row, channel = at // width, at % width
    at_gate = gate + row // heads * gate_row + row % heads * gate_head + channel
    opened = activated(tl.load(at_gate, mask=inside, other=0.0).to(tl.float32), "sigmoid")
    value = tl.load(x + at, mask=inside, other=0.0)
    tl.store(x + at, value * opened.to(value.dtype), mask=inside)


def delta_gates(a_NH: Tensor, b_NH: Tensor, dt_bias_H: Tensor, decay_H: Tensor, strength: float) -> Tensor:
    """Return softplus(a + dt_bias) · decay and sigmoid(b) · strength, [N, 2, H] float32.

    a and b are parts of the same rows.
    """
    n, heads = a_NH.shape
    out_N2H = torch.empty(n, 2, heads, dtype=torch.float32, device=a_NH.device)
    if n:
        _delta_gates[(triton.cdiv(n * heads, GATES),)](
            a_NH, b_NH, dt_bias_H, decay_H, strength, out_N2H, n * heads, heads, a_NH.stride(0), block=GATES
        )  # fmt: skip
    return out_N2H


def open_(x_NHD: Tensor, gate_NHD: Tensor) -> Tensor:
    """Multiply contiguous x in place by the sigmoid of a gate, rounded to its dtype; return x."""
    n, heads, width = x_NHD.shape
    if gate_NHD.stride(2) != 1:
        gate_NHD = gate_NHD.contiguous()
    if n:
        _open[(triton.cdiv(x_NHD.numel(), BLOCK),)](
            x_NHD, gate_NHD, x_NHD.numel(), width, heads, *gate_NHD.stride()[:2], block=BLOCK
        )  # fmt: skip
    return x_NHD


def activate(x_X: Tensor, kind: str) -> Tensor:
    """Return the `sigmoid`, `silu` or `softplus` of x, computed in float32, in the dtype of x."""
    rows = x_X.dim() == 2 and x_X.stride(1) == 1
    x_X = x_X if rows else x_X.contiguous()
    columns = x_X.shape[-1] if x_X.dim() else 1
    out_X = x_X.new_empty(x_X.shape)
    if n := x_X.numel():
        row = x_X.stride(0) if rows else columns
        _activate[(triton.cdiv(n, BLOCK),)](x_X, out_X, n, columns, row, kind=kind, block=BLOCK)
    return out_X


def convolve_tokens(
    x_BC: Tensor, weight_WC: Tensor, bias_C: Tensor | None, silu: bool, state_RCw: Tensor, slot_B: Tensor
) -> Tensor:
    """Return the convolution, or silu of it, of one token of each sequence, [B, C] float32; update their stored inputs.

    Rows of x may be strided, each is contiguous; the state may have any strides.
    """
    n, n_channels = x_BC.shape
    out_BC = torch.empty(n, n_channels, dtype=torch.float32, device=x_BC.device)
    _convolve_token[n, triton.cdiv(n_channels, CHANNELS)](
        x_BC, state_RCw, weight_WC, weight_WC if bias_C is None else bias_C, out_BC, slot_B, n_channels,
        x_BC.stride(0), *state_RCw.stride(), before=weight_WC.shape[0] - 1, has_bias=bias_C is not None,
        silu=silu, channels=CHANNELS, num_warps=CHANNELS // 32,
    )  # fmt: skip
    return out_BC
