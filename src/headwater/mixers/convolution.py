"""The short causal convolution before a recurrence, depthwise, mostly with silu; its last inputs are part of the state.

N rows of a step, T tokens, B decoding sequences, n chunks, t = 64, C channels, W taps, w = W − 1, L = w + t, R rows of
the state memory, X any trailing dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.mixers.activations import silu
from headwater.mixers.slices import CHUNK, Chunk


class ShortConvolution:
    """A depthwise convolution in float32, from weights [C, 1, W] or [C, W] and an optional bias."""

    def __init__(self, weight: Tensor, bias_C: Tensor | None = None, activated: bool = True) -> None:
        self.weight_WC = weight.flatten(1).float().T.contiguous()
        self.bias_C = None if bias_C is None else bias_C.float()
        self.activated = activated
        self.before, self.channels = self.weight_WC.shape[0] - 1, self.weight_WC.shape[1]

    @property
    def taps(self) -> tuple[Tensor, Tensor | None, bool]:
        """The weights, the bias, and whether silu follows."""
        return self.weight_WC, self.bias_C, self.activated

    def tail(self, window_LC: Tensor, length: int) -> Tensor:
        """Return the last w inputs of a window's first `length` tokens, [C, w], which the next chunk needs."""
        return window_LC[length : length + self.before].T

    def __call__(self, window_nLC: Tensor) -> Tensor:
        """Return the convolution, or silu of it, computed as shifted multiply-adds; [n, L − w, C]."""
        length = window_nLC.shape[1] - self.before
        sum_ntC = window_nLC[:, :length] * self.weight_WC[0]
        for shift in range(1, self.before + 1):
            sum_ntC.addcmul_(window_nLC[:, shift : shift + length], self.weight_WC[shift])
        if self.bias_C is not None:
            sum_ntC.add_(self.bias_C)
        return silu(sum_ntC) if self.activated else sum_ntC

    def decode(self, mixed_BC: Tensor, state_BCw: Tensor) -> Tensor:
        """Convolve one token of each of B sequences, [B, C] float32; shift their stored inputs in place."""
        window_BLC = torch.cat((state_BCw.mT.float(), mixed_BC.float().unsqueeze(1)), 1)
        state_BCw.copy_(window_BLC[:, 1:].mT)
        return self(window_BLC)[:, 0]


def windows(x_NX: Tensor, chunks: list[Chunk], before: int = 0, state_RXw: Tensor | None = None) -> Tensor:
    """Collect the chunks' rows, float32 [n, L, X], each with the w = `before` inputs before it, padded with zeros.

    `state_RXw` are all rows of the layer's state memory: inputs before the first chunk of a slice.
    """
    window_nLX = torch.empty((len(chunks), before + CHUNK, *x_NX.shape[1:]), dtype=torch.float32, device=x_NX.device)
    for window_LX, chunk in zip(window_nLX, chunks, strict=True):
        window_LX[before + chunk.length :] = 0
        if chunk.index or state_RXw is None:
            window_LX[: before + chunk.length] = x_NX[chunk.first - before : chunk.rows.stop]
        else:
            window_LX[:before] = state_RXw[chunk.parent.slot].T
            window_LX[before : before + chunk.length] = x_NX[chunk.rows]
    return window_nLX


def causal_convolution(x_TC: Tensor, weight_WC: Tensor, tail_CW: Tensor) -> Tensor:
    """Return each channel's weighted sum of its last W inputs; `tail_CW` has the inputs before the first token."""
    width = weight_WC.shape[0]
    x_TC = torch.cat((tail_CW.T.to(x_TC.dtype), x_TC))
    return torch.stack([(x_TC[t : t + width] * weight_WC).sum(0) for t in range(x_TC.shape[0] - width + 1)])
