"""A layer's tensors by Headwater's names, each in the form that its computation takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import Self, TypeVar

import torch
from torch import Tensor

from headwater.mixers.linear import Linear
from headwater.mixers.products import Weight
from headwater.mixers.quantised import Quantised, joined

Stored = Weight | list[Weight]  # a list: weights whose outputs follow each other, as those of experts do

Built = TypeVar("Built")


@dataclass(eq=False)
class Weights:
    """Tensors as they are stored, by name, and the dtype and device to compute on.

    Methods return copies, so that nothing keeps a checkpoint's file mapped; `stored` returns a view.
    """

    tensors: Mapping[str, Stored]
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    prefix: str = ""  # of the names that methods take

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def below(self, name: str) -> Self:
        """Return the tensors whose names begin with `name.`, by the rest of their names."""
        part = copy(self)
        part.prefix = f"{self.prefix}{name}."
        return part

    def in_float32(self) -> Self:
        """Return the same tensors for products in float32, whatever dtype the model computes in."""
        part = copy(self)
        part.dtype = torch.float32
        return part

    def stored(self, name: str) -> Tensor:
        """Return a tensor as it is stored: a view of the file; of integers, their values."""
        return values_of(self.tensors[self.prefix + name])

    def parts(self, name: str) -> list[Weight]:
        """Return a weight of products, in parts whose outputs follow each other."""
        stored = self.tensors[self.prefix + name]
        return [self._held(part) for part in (stored if isinstance(stored, list) else [stored])]

    def experts(self, name: str) -> list[Weight]:
        """Return the weight of each expert, from a tensor [E, N, K] or a list."""
        stored = self.tensors[self.prefix + name]
        return stored if isinstance(stored, list) else [*values_of(stored).unbind(0)]

    def vector(self, name: str) -> Tensor:
        """Copy a tensor in float32, in which decays, norms and steps are computed."""
        return self.stored(name).to(device=self.device, dtype=torch.float32, copy=True)

    def optional(self, name: str) -> Tensor | None:
        """Copy a tensor in float32, or return None if its name is unknown."""
        return self.vector(name) if name in self else None

    def cast(self, tensor: Tensor) -> Tensor:
        """Convert a tensor to the dtype and device of products."""
        return tensor.to(device=self.device, dtype=self.dtype)

    def held(self, name: str) -> Weight:
        """Return a weight of products, which is one; in the dtype that it is stored in, or the model's if shorter."""
        (weight,) = self.parts(name)
        return weight

    def linear(self, *names: str) -> Linear:
        """Build one product whose outputs are those of several names (without `.weight`) side by side, with biases."""
        weights = [self.parts(f"{name}.weight") for name in names]
        biases = [f"{name}.bias" for name in names]
        bias_N = None
        if any(bias in self for bias in biases):
            heights = (sum(part.shape[0] for part in parts) for parts in weights)
            named = zip(biases, heights, strict=True)
            bias_N = torch.cat([self.cast(self.stored(b) if b in self else torch.zeros(n)) for b, n in named])
        return self.packed([part for parts in weights for part in parts], bias_N)

    def packed(self, weight_NK: Weight | Sequence[Weight], bias_N: Tensor | None = None) -> Linear:
        """Build the product with weights that were assembled from stored ones, side by side."""
        given = [weight_NK] if isinstance(weight_NK, (Tensor, Quantised)) else weight_NK
        weights = _fewest([self._held(weight) for weight in given])
        return Linear(weights, None if bias_N is None else self.cast(bias_N).clone(), dtype=self.dtype)

    def of_experts(self, stacked: Sequence[Weight], build: Callable[[list[Weight], torch.dtype], Built]) -> Built:
        """Build what multiplies by the weights of all experts."""
        return build([self._held(weight) for weight in stacked], self.dtype)

    def _held(self, weight: Weight) -> Weight:
        """Return a weight on the device of products: in its own dtype on the CPU, if that is no longer than theirs."""
        on_cpu = torch.device(self.device).type == "cpu"
        if isinstance(weight, Quantised):
            return weight if on_cpu else self.cast(weight.values())
        keeps = on_cpu and weight.dtype.itemsize <= self.dtype.itemsize
        return weight.to(device=self.device, dtype=weight.dtype if keeps else self.dtype)


def _fewest(weights: Sequence[Weight]) -> list[Weight]:
    """Join neighbours of one format, so that a product has as few parts as possible."""
    joins = (list(run) for _, run in groupby(weights, format_of))
    return [weights_as_one(run) for run in joins]


def weights_as_one(run: Sequence[Weight]) -> Weight:
    """Return weights of one format whose outputs follow each other as one."""
    tensors = [weight for weight in run if isinstance(weight, Tensor)]
    if len(run) == 1:
        return run[0]
    return torch.cat(tensors) if tensors else joined([weight for weight in run if isinstance(weight, Quantised)])


def format_of(weight: Weight) -> tuple[object, ...]:
    """Return all that has to be equal for two weights to be one."""
    if isinstance(weight, Tensor):
        return (weight.dtype,)
    order = None if weight.order_K is None else weight.order_K.numpy().tobytes()
    return (weight.bits, weight.table, order, *((name, part.dtype, part.shape[1]) for name, part in weight.parts()))


def values_of(stored: Stored) -> Tensor:
    """Return a tensor, of integers their values in float32; of a list, which is of experts, a stack [E, N, K]."""
    if isinstance(stored, list):
        return torch.stack([values_of(part) for part in stored])
    return stored if isinstance(stored, Tensor) else stored.values()
