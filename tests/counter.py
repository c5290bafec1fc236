"""Counts what is really computed: products of the model, pairs of attention, operations of a reference's recurrence."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headwater.mixers.linear import Linear
from headwater.mixers.numerics import Numerics

WITH_SUMS = "_scaled_dot_product_flash_attention_for_cpu"  # torch's attention that returns each softmax's sum as well
PLAIN = Numerics("plain")  # one torch product for each of the model's, without filled-up rows


@dataclass
class Flops:
    """Two for each multiply-add."""

    products: int = 0
    pairs: int = 0

    @property
    def total(self) -> int:
        return self.products + self.pairs


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[Flops]:
    """FLOPs of all products with weights, and of attention by the keys that its mask lets each query see.

    Heads and channels that only fill a product up are left out. The model is loaded within, and its products are PLAIN.
    """
    flops, product, attend = Flops(), Linear._side_by_side, torch.nn.functional.scaled_dot_product_attention
    with_sums = getattr(torch.ops.aten, WITH_SUMS)

    def count_product(linear: Linear, x_RK: torch.Tensor, *of_outputs: Any) -> torch.Tensor:
        flops.products += 2 * x_RK.shape[0] * linear.n_in * linear.n_out
        return product(linear, x_RK, *of_outputs)

    def count_pairs(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        attend: Callable[..., Any] = attend,
        **kwargs: Any,
    ) -> Any:
        seen = math.prod(q.shape[:-1]) * k.shape[-2]
        if attn_mask is not None:
            seen = int((attn_mask.expand(*q.shape[:-1], -1) == 0).sum())
        repeated = math.prod(n for n, stride in zip(q.shape, q.stride(), strict=True) if stride == 0)
        flops.pairs += 2 * seen // repeated * (_channels(k) + _channels(v))
        return attend(q, k, v, attn_mask=attn_mask, **kwargs)

    with patch.context() as patched:
        patched.setattr(Linear, "_side_by_side", count_product)
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", count_pairs)
        of_sinks = partial(count_pairs, attend=with_sums)
        patched.setattr(torch.ops.aten, WITH_SUMS, of_sinks)
        yield flops


def _channels(x: torch.Tensor) -> int:
    """Return the number of channels with values; the others only pad keys and values to equal widths."""
    return int(x.flatten(0, -2).any(0).sum())


PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"}
ONE_AN_ELEMENT = {"mul", "add", "sub", "addcmul", "sum", "mean"}
OPERATIONS = {name: 2 if name == "addcmul" else 1 for name in ONE_AN_ELEMENT}


class OperationCounter(TorchDispatchMode):
    """Multiplications and additions over tensors of more than `above` elements; what is smaller is not counted.

    A product of matrices counts two a multiply-add, of whatever size.
    """

    def __init__(self, above: int) -> None:
        super().__init__()
        self.above, self.products, self.others = above, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if name in PRODUCTS:
            self.products += 2 * tensors[-2].shape[-2] * tensors[-1].numel() if name != "dot" else 0
        elif name in ONE_AN_ELEMENT:
            size = max(t.numel() for t in (*tensors, out))
            self.others += OPERATIONS[name] * size if size > self.above else 0
        return out
