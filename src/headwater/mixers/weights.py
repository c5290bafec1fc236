"""A layer's tensors by our names, each in the form that it is computed with."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import torch

from headwater.mixers.linear import Linear


class Weights:
    """Tensors as they are stored, by name, and the dtype and device to compute on.

    What is taken out of it is a copy, so that nothing keeps a checkpoint's file mapped.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefix: str = "",
    ) -> None:
        self._tensors, self._prefix = tensors, prefix
        self.dtype, self.device = dtype, device

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def below(self, name: str) -> Weights:
        """Those whose names begin with `name`, by what follows the dot."""
        return Weights(self._tensors, self.dtype, self.device, f"{self._prefix}{name}.")

    def in_float32(self) -> Weights:
        """The same, for products in float32 whatever the model computes in."""
        part = copy(self)
        part.dtype = torch.float32
        return part

    def stored(self, name: str) -> torch.Tensor:
        """As it is stored: a view of the file."""
        return self._tensors[self._prefix + name]

    def vector(self, name: str) -> torch.Tensor:
        """In float32: decays, norms, steps and the like are computed so."""
        return self.stored(name).to(device=self.device, dtype=torch.float32, copy=True)

    def optional(self, name: str) -> torch.Tensor | None:
        """The same, or None where there is no such tensor."""
        return self.vector(name) if name in self else None

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """To the dtype and device of products."""
        return tensor.to(device=self.device, dtype=self.dtype)

    def linear(self, *names: str) -> Linear:
        """One product that yields those of several names (without `.weight`) side by side, with their biases."""
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

    def packed(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> Linear:
        """The product with a weight that was put together of stored ones."""
        return Linear(self.cast(weight_NK), None if bias_N is None else self.cast(bias_N).clone())
