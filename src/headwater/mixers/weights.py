"""A layer's tensors by Headwater's names, each in the form that its computation takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from headwater.mixers.linear import Linear, Weight
from headwater.mixers.quantised import Quantised


@dataclass(eq=False)
class Weights:
    """Tensors as they are stored, by name, and the dtype and device to compute on.

    Methods return copies, so that nothing keeps a checkpoint's file mapped; `stored` returns a view.
    """

    tensors: Mapping[str, Tensor]
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
        """Return a tensor as it is stored: a view of the file."""
        return self.tensors[self.prefix + name]

    def vector(self, name: str) -> Tensor:
        """Copy a tensor in float32, in which decays, norms and steps are computed."""
        return self.stored(name).to(device=self.device, dtype=torch.float32, copy=True)

    def optional(self, name: str) -> Tensor | None:
        """Copy a tensor in float32, or return None if there is no tensor of this name."""
        return self.vector(name) if name in self else None

    def cast(self, tensor: Tensor) -> Tensor:
        """Convert a tensor to the dtype and device of products."""
        return tensor.to(device=self.device, dtype=self.dtype)

    def held(self, name: str) -> Weight:
        """Return a tensor for products, in the dtype that it is stored in, or the model's if that is shorter."""
        return self._held(self.stored(name))

    def linear(self, *names: str) -> Linear:
        """Build one product whose outputs are those of several names (without `.weight`) side by side, with biases."""
        weights = [self.held(f"{name}.weight") for name in names]
        biases = [f"{name}.bias" for name in names]
        bias_N = None
        if any(bias in self for bias in biases):
            parts = zip(biases, weights, strict=True)
            bias_N = torch.cat([self.cast(self.stored(b) if b in self else torch.zeros(w.shape[0])) for b, w in parts])
        return self.packed(weights, bias_N)

    def packed(self, weight_NK: Weight | Sequence[Weight], bias_N: Tensor | None = None) -> Linear:
        """Build the product with weights that were assembled from stored ones, side by side."""
        given = [weight_NK] if isinstance(weight_NK, (Tensor, Quantised)) else weight_NK
        weights = [self._held(weight) for weight in given]
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        if len(plain) == len(weights) > 1 and len({weight.dtype for weight in plain}) == 1:
            weights = [torch.cat(plain)]
        return Linear(weights, None if bias_N is None else self.cast(bias_N).clone(), dtype=self.dtype)

    def _held(self, weight: Weight) -> Weight:
        """Return a weight on the device of products: in its own dtype on the CPU, if that is no longer than theirs."""
        if isinstance(weight, Quantised):
            return weight
        keeps = torch.device(self.device).type == "cpu" and weight.dtype.itemsize <= self.dtype.itemsize
        return weight.to(device=self.device, dtype=weight.dtype if keeps else self.dtype)
