"""A layer's tensors by Headwater's names, each in the form that its computation takes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import torch
from torch import Tensor

from headwater.mixers.linear import Linear


class Weights:
    """Tensors as they are stored, by name, and the dtype and device to compute on.

    Methods return copies, so that nothing keeps a checkpoint's file mapped; `stored` returns a view.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefix: str = "",
    ) -> None:
        self._tensors, self._prefix = tensors, prefix
        self.dtype, self.device = dtype, device

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def below(self, name: str) -> Weights:
        """Return the tensors whose names begin with `name.`, by the rest of their names."""
        return Weights(self._tensors, self.dtype, self.device, f"{self._prefix}{name}.")

    def in_float32(self) -> Weights:
        """Return the same tensors for products in float32, whatever dtype the model computes in."""
        part = copy(self)
        part.dtype = torch.float32
        return part

    def stored(self, name: str) -> Tensor:
        """Return a tensor as it is stored: a view of the file."""
        return self._tensors[self._prefix + name]

    def vector(self, name: str) -> Tensor:
        """Copy a tensor in float32, in which decays, norms and steps are computed."""
        return self.stored(name).to(device=self.device, dtype=torch.float32, copy=True)

    def optional(self, name: str) -> Tensor | None:
        """Copy a tensor in float32, or return None if there is no tensor of this name."""
        return self.vector(name) if name in self else None

    def cast(self, tensor: Tensor) -> Tensor:
        """Convert a tensor to the dtype and device of products."""
        return tensor.to(device=self.device, dtype=self.dtype)

    def linear(self, *names: str) -> Linear:
        """Build one product whose outputs are those of several names (without `.weight`) side by side, with biases."""
        stored = [self.stored(f"{name}.weight") for name in names]
        weights = [self.cast(weight) for weight in stored]
        biases = [f"{name}.bias" in self for name in names]
        bias_N = None
        if any(biases):
            parts = [
                self.cast(self.stored(f"{name}.bias")) if has else weight.new_zeros(len(weight))
                for name, weight, has in zip(names, weights, biases, strict=True)
            ]
            bias_N = torch.cat(parts)
        return self.packed(weights[0] if len(weights) == 1 else torch.cat(weights), bias_N)

    def packed(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        """Build the product with a weight that was assembled from stored ones."""
        return Linear(self.cast(weight_NK), None if bias_N is None else self.cast(bias_N).clone())
