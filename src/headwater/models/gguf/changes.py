"""Changes that undo those of llama.cpp's converters: another order of rows or inputs, or another form of numbers.

N outputs, K inputs, X groups of inputs, S groups of groups, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from headwater.mixers.quantised import Quantised

Weight = Tensor | Quantised
Change = Callable[[Weight], Weight]


def plain(weight: Weight) -> Weight:
    """Return the weight as it is."""
    return weight


def less_one(weight: Weight) -> Weight:
    """Return the weight of a norm that is centred at zero: converters store 1 + w.

    In float32 no bit of the gain is lost: 1 + (g − 1) is g for every g that is the sum of 1 and a float32 number.
    """
    return numbers(weight).float() - 1


def logarithm(weight: Weight) -> Weight:
    """Return the logarithm of decay rates, A_log: converters store −exp(A_log)."""
    return numbers(weight).double().neg().log().float()


def flat(weight: Weight) -> Weight:
    """Return a vector that converters store group by group, or with a dimension of size 1."""
    return numbers(weight).flatten()


def numbers(weight: Weight) -> Tensor:
    """Return the numbers of a weight in any format."""
    return weight.values() if isinstance(weight, Quantised) else weight


def rows(order_N: Tensor) -> Change:
    """Return the change that puts row `order_N[n]` at n."""

    def change(weight: Weight) -> Weight:
        return weight.rows(order_N) if isinstance(weight, Quantised) else weight[order_N]

    return change


def inputs(order_R: Tensor, run: int) -> Change:
    """Return the change that puts run `order_R[r]`, each of `run` inputs, at r."""

    def change(weight: Weight) -> Weight:
        if not isinstance(weight, Quantised):
            return _runs(weight, run, order_R)
        return _in_runs(weight, run, order_R)

    return change


def _runs(part_NK: Tensor, run: int, order_R: Tensor) -> Tensor:
    moved: Tensor = part_NK.unflatten(1, (-1, run))[:, order_R]
    return moved.flatten(1)


def _in_runs(weight: Quantised, run: int, order_R: Tensor) -> Quantised:
    """Reorder inputs with their scales; a group that lies in several runs is cut, each part with the group's scale."""
    n_in = weight.shape[1]
    group = gcd(weight.group, run)
    parts: dict[str, Any] = {"code_NK": _runs(weight.code_NK, run, order_R)}
    for name in ("scale_NX", "zero_NX", "minimum_NX"):
        part_NX: Tensor | None = getattr(weight, name)
        if part_NX is not None and part_NX.shape[1] > 1:
            parts[name] = _runs(part_NX.repeat_interleave(n_in // group // part_NX.shape[1], 1), run // group, order_R)
    for name in ("outer_scale_NS", "outer_minimum_NS"):
        part_NS: Tensor | None = getattr(weight, name)
        if part_NS is not None:
            outer = gcd(n_in // part_NS.shape[1], run)
            parts[name] = _runs(part_NS.repeat_interleave(n_in // outer // part_NS.shape[1], 1), run // outer, order_R)
    return replace(weight, **parts)


def grouped(k_heads: int, v_heads: int) -> Tensor:
    """Return the places of value heads, in the order of key heads, among heads that are tiled.

    Converters store head v of key head k at v · k_heads + k; checkpoints have it at k · (v_heads / k_heads) + v.
    """
    return torch.arange(v_heads).view(-1, k_heads).T.flatten()


def of_heads(order_H: Tensor, width: int, before: int = 0) -> Tensor:
    """Return the order of rows, `width` of a head, for an order of heads; `before` rows stay in front."""
    row_HW = order_H[:, None] * width + torch.arange(width)
    return torch.cat([torch.arange(before), before + row_HW.flatten()])


def unpermuted(heads: int, head_dim: int) -> Tensor:
    """Return the order of rows of queries or keys whose converter put rotated pairs of channels side by side."""
    order: Tensor = torch.arange(heads * head_dim).view(heads, head_dim // 2, 2).transpose(1, 2)
    return order.flatten()


def then(*changes: Change) -> Change:
    """Return the changes one after the other, as one."""

    def change(weight: Weight) -> Weight:
        for one in changes:
            weight = one(weight)
        return weight

    return change
