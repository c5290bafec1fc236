"""Root mean square norm, row by row in float32."""

from __future__ import annotations

import torch

from headwater.mixers.activations import inverse_rms


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * (offset + w)` over the last dimension; the result has x's dtype.

    Some checkpoints hold w around zero, to which an offset of 1 is added.
    """

    def __init__(self, weight_C: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self._scale_C = weight_C.float() + offset
        self._eps = eps

    def __call__(self, x_NC: torch.Tensor) -> torch.Tensor:
        return self.in_float32(x_NC).to(x_NC.dtype)

    def in_float32(self, x_NC: torch.Tensor) -> torch.Tensor:
        """The same, before it is rounded to x's dtype."""
        h_NC = x_NC.float()
        return (h_NC * inverse_rms(h_NC, self._eps)).mul_(self._scale_C)
