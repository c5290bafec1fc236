"""Norms of rows in Triton, a kernel each: the order of their sums is fixed.

Torch's reductions on a GPU share a row among more threads where there are fewer rows, which changes its last bits.

R rows, D width of a row, C model width, N rows of a step, H heads, G key heads, K key width.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.mixers.gpu import dense
from headwater.mixers.gpu.pointwise import activated

ELEMENTS = 2048  # of a program: narrow rows share one


@triton.jit(do_not_specialize=["n_rows"])
def _squares(x, out, n_rows, width: tl.constexpr, padded: tl.constexpr, rows: tl.constexpr):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, padded)
    inside = (row < n_rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + row[:, None].to(tl.int64) * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(value * value, 1), mask=row < n_rows)


@triton.jit
def _norm(
    x, added, weight, out, factor, eps, width: tl.constexpr, padded: tl.constexpr, adds: tl.constexpr
):  # fmt: skip
    """Norm one row; with `adds`, after adding to it in place, as the sum is stored."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    inside = column < width
    at = row * width + column
    value = tl.load(x + at, mask=inside, other=0.0)
    if adds:
        more = tl.load(added + at, mask=inside, other=0.0).to(tl.float32) * factor
        value = (value.to(tl.float32) + more).to(value.dtype)
        tl.store(x + at, value, mask=inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    normed = value * scale * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["gate_row"], do_not_specialize_on_alignment=["gate", "out"])
def _gated_norm(
    x, gate, weight, out, heads, gate_row, eps, kind: tl.constexpr, width: tl.constexpr, padded: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    normed = value * scale * tl.load(weight + column, mask=inside, other=0.0)
    at_gate = gate + row // heads * gate_row + row % heads * width + column
    opened = activated(tl.load(at_gate, mask=inside, other=0.0).to(tl.float32), kind)
    tl.store(out + row * width + column, (normed * opened).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _unit(x, out, n_rows, heads, x_row, factor, width: tl.constexpr, padded: tl.constexpr):
    """Norm the queries and keys of one token and head to length 1, times `factor` for queries."""
    row, head, is_key = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    column = tl.arange(0, padded)
    inside = column < width
    value = tl.load(x + row * x_row + (is_key * heads + head) * width + column, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) + 1e-6)
    scale = tl.where(is_key == 0, scale * factor, scale)
    tl.store(out + ((is_key * n_rows + row) * heads + head) * width + column, value * scale, mask=inside)


@triton.jit(do_not_specialize=["n_heads", "x_row", "x_head"], do_not_specialize_on_alignment=["x", "out"])
def _place(
    x, scale, cos_sin, out, n_heads, heads, x_row, x_head, eps, width: tl.constexpr, padded: tl.constexpr,
    half: tl.constexpr, neighbours: tl.constexpr, normed: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """Norm heads of rows, then rotate their first 2 · `half` channels, in float32."""
    which = tl.program_id(0) * at_once + tl.arange(0, at_once)
    row, head = (which // heads).to(tl.int64)[:, None], (which % heads)[:, None]
    channel = tl.arange(0, padded)[None, :]
    in_heads = (which < n_heads)[:, None]
    inside = in_heads & (channel < width)
    at = x + row * x_row + head * x_head
    value = tl.load(at + channel, mask=inside, other=0.0).to(tl.float32)
    if normed:
        factor = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        value = value * factor * tl.load(scale + channel, mask=channel < width, other=0.0)
    if half > 0:
        if neighbours:
            other, angle, is_first = channel ^ 1, channel // 2, channel % 2 == 0
        else:
            is_first = channel < half
            other, angle = tl.where(is_first, channel + half, channel - half), channel % half
        turns = channel < 2 * half
        partner = tl.load(at + other, mask=in_heads & turns, other=0.0).to(tl.float32)
        if normed:
            partner = partner * factor * tl.load(scale + other, mask=turns, other=0.0)
        cos = tl.load(cos_sin + row * 2 * half + angle, mask=in_heads & turns, other=1.0)
        sin = tl.load(cos_sin + (row * 2 + 1) * half + angle, mask=in_heads & turns, other=0.0)
        value = value * cos + tl.where(is_first, -partner, partner) * sin
    tl.store(out + which.to(tl.int64)[:, None] * width + channel, value.to(out.dtype.element_ty), mask=inside)


class ScaledNorm(Protocol):
    """An RMS norm with the scale of its channels."""

    scale_C: Tensor
    eps: float


def place(x_NHD: Tensor, norm: ScaledNorm | None, cos_sin_N2F: Tensor | None, neighbours: bool) -> Tensor:
    """Return heads normed, if there is a norm, and their first 2F channels rotated, if they are: contiguous."""
    n, heads, width = x_NHD.shape
    if x_NHD.stride(2) != 1:
        x_NHD = x_NHD.contiguous()
    out_NHD = torch.empty(n, heads, width, dtype=x_NHD.dtype, device=x_NHD.device)
    padded = triton.next_power_of_2(width)
    at_once = max(1, ELEMENTS // padded)
    if n:
        _place[(triton.cdiv(n * heads, at_once),)](
            x_NHD, out_NHD if norm is None else norm.scale_C, out_NHD if cos_sin_N2F is None else cos_sin_N2F, out_NHD,
            n * heads, heads, *x_NHD.stride()[:2], 0.0 if norm is None else norm.eps, width=width, padded=padded,
            half=0 if cos_sin_N2F is None else cos_sin_N2F.shape[-1], neighbours=neighbours, normed=norm is not None,
            at_once=at_once,
        )  # fmt: skip
    return out_NHD


def squares(x_XD: Tensor) -> Tensor:
    """Return Σx² over the last dimension, float32 [X, 1]. A row's bits depend only on the row."""
    width = x_XD.shape[-1]
    x_RD = dense(x_XD).view(-1, width)
    out_R = torch.empty(len(x_RD), dtype=torch.float32, device=x_XD.device)
    padded = triton.next_power_of_2(width)
    rows = max(1, ELEMENTS // padded)
    _squares[(triton.cdiv(len(x_RD), rows),)](x_RD, out_R, len(x_RD), width=width, padded=padded, rows=rows)
    return out_R.view(*x_XD.shape[:-1], 1)


def rms_norm(
    x_XD: Tensor, scale_D: Tensor, eps: float, dtype: torch.dtype, added_XD: Tensor | None = None, factor: float = 1.0
) -> Tensor:
    """Return the RMS norm of rows, times a scale, in `dtype`; `added_XD` times a factor is added to x before, in place.

    With `added_XD`, x is contiguous at a multiple of 16 bytes.
    """
    width, x_XD = x_XD.shape[-1], dense(x_XD)
    out_XD = torch.empty(x_XD.shape, dtype=dtype, device=x_XD.device)
    if n := x_XD.numel() // width:
        more = x_XD if added_XD is None else dense(added_XD)
        _norm[(n,)](
            x_XD, more, scale_D, out_XD, factor, eps, width=width, padded=triton.next_power_of_2(width),
            adds=added_XD is not None,
        )  # fmt: skip
    return out_XD


def gated_norm_into(out_NHD: Tensor, x_NHD: Tensor, gate_NHD: Tensor, weight_D: Tensor, eps: float, kind: str) -> None:
    """Write the RMS norm of float32 rows, times a weight and the activation of a gate; the result is contiguous."""
    n, heads, width = x_NHD.shape
    if gate_NHD.stride()[1:] != (width, 1):
        gate_NHD = gate_NHD.contiguous()
    x_NHD = dense(x_NHD)
    if n:
        _gated_norm[(n * heads,)](
            x_NHD, gate_NHD, weight_D, out_NHD, heads, gate_NHD.stride(0), eps, kind=kind, width=width,
            padded=triton.next_power_of_2(width),
        )  # fmt: skip


def unit_queries_keys(qk_N2GK: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries of length 1/√K and keys of length 1, float32 [N, G, K] each; rows of the argument are strided."""
    n, _, heads, width = qk_N2GK.shape
    out_2NGK = torch.empty(2, n, heads, width, dtype=torch.float32, device=qk_N2GK.device)
    if n:
        _unit[n, heads, 2](
            qk_N2GK, out_2NGK, n, heads, qk_N2GK.stride(0), width**-0.5, width=width,
            padded=triton.next_power_of_2(width),
        )  # fmt: skip
    q_NGK, k_NGK = out_2NGK.unbind(0)
    return q_NGK, k_NGK
