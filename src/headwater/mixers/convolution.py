"""The short causal convolution before a recurrence: depthwise, with silu; its last inputs are part of the state.

N rows of a step, B decoding sequences, n chunks, t = 64, C channels, W taps, w = W − 1, L = w + t.
"""

from __future__ import annotations

import torch

from headwater.mixers.activations import silu
from headwater.mixers.batch import CHUNK, Chunk


class ShortConvolution:
    """A depthwise convolution in float32, from weights [C, 1, W] or [C, W] and an optional bias."""

    def __init__(self, weight: torch.Tensor, bias_C: torch.Tensor | None = None) -> None:
        self.weight_WC = weight.flatten(1).float().T.contiguous()
        self.bias_C = None if bias_C is None else bias_C.float()
        self.before, self.channels = self.weight_WC.shape[0] - 1, self.weight_WC.shape[1]

    def windows(self, mixed_NC: torch.Tensor, chunks: list[Chunk], state_RCw: torch.Tensor) -> torch.Tensor:
        """Collect the chunks' inputs, float32 [n, L, C], each with the w inputs before it, padded with zeros.

        `state_RCw` are all rows of the layer's state memory.
        """
        before = self.before
        window_nLC = torch.empty(
            (len(chunks), before + CHUNK, self.channels), dtype=torch.float32, device=mixed_NC.device
        )
        for window_LC, chunk in zip(window_nLC, chunks, strict=True):
            window_LC[before + chunk.length :].zero_()
            if chunk.index:
                window_LC[: before + chunk.length] = mixed_NC[chunk.first - before : chunk.rows.stop]
            else:
                window_LC[:before] = state_RCw[chunk.parent.slot].T
                window_LC[before : before + chunk.length] = mixed_NC[chunk.rows]
        return window_nLC

    def tail(self, window_LC: torch.Tensor, length: int) -> torch.Tensor:
        """Return the last w inputs of a window's first `length` tokens, [C, w], which the next chunk needs."""
        return window_LC[length : length + self.before].T

    def __call__(self, window_nLC: torch.Tensor) -> torch.Tensor:
        """Return silu of the convolution, computed as shifted multiply-adds; [n, L − w, C]."""
        length = window_nLC.shape[1] - self.before
        sum_ntC = window_nLC[:, :length] * self.weight_WC[0]
        for shift in range(1, self.before + 1):
            sum_ntC.addcmul_(window_nLC[:, shift : shift + length], self.weight_WC[shift])
        return silu(sum_ntC if self.bias_C is None else sum_ntC.add_(self.bias_C))

    def decode(self, mixed_BC: torch.Tensor, state_BCw: torch.Tensor) -> torch.Tensor:
        """Convolve one token of each of B sequences, [B, C] float32; shift their stored inputs in place."""
        window_BLC = torch.cat((state_BCw.mT.float(), mixed_BC.float().unsqueeze(1)), 1)
        state_BCw.copy_(window_BLC[:, 1:].mT)
        return self(window_BLC)[:, 0]


def causal_convolution(x_TC: torch.Tensor, weight_WC: torch.Tensor, tail_CW: torch.Tensor) -> torch.Tensor:
    """Return each channel's weighted sum of its last W inputs; `tail_CW` has the inputs before the first token."""
    width = weight_WC.shape[0]
    x_TC = torch.cat((tail_CW.T.to(x_TC.dtype), x_TC))
    return torch.stack([(x_TC[t : t + width] * weight_WC).sum(0) for t in range(x_TC.shape[0] - width + 1)])
