"""Decoding of Mamba-1 by two kernels, with the products of steps between. B decoding sequences, C channels."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headwater.kernels import mamba
from headwater.kernels.arrays import flat
from headwater.kernels.recording import empty
from headwater.mixers.activations import LOG2_E
from headwater.mixers.batch import StepBatch
from headwater.mixers.cpu.memory import Memory, padded, taps_of
from headwater.mixers.mamba import SelectiveStateSpace


class SelectiveStateSpaceKernel:
    """The kernels with the layer's weights."""

    def __init__(self, mixer: SelectiveStateSpace) -> None:
        s = mixer.shape
        self.mixer, self.before = mixer, mixer.convolution.before
        self.taps, self.bias, self.skip = taps_of(mixer.convolution), padded(mixer.dt_bias_C), padded(mixer.skip_C)
        self.rate = np.concatenate([padded(rate_C / LOG2_E) for rate_C in mixer.log2_rate_EC])
        self.sizes = (s.inner, s.state)

    def decode_into(self, out_BX: Tensor, products: tuple[Tensor, ...], batch: StepBatch, memory: Memory) -> None:
        (projected_BE,) = products
        projected, sequences, channels = flat(projected_BE), batch.decode_sequences, self.sizes[0]
        x_BP = empty(len(out_BX), -(-channels // mamba.BLOCK) * mamba.BLOCK)
        x = flat(x_BP)
        mamba.convolve_rows_into(
            x, projected, *sequences, self.taps, memory.stored, memory.stored_row, channels, self.before
        )
        of_steps = self.mixer.step_products(x_BP[:, :channels], 0)
        mamba.scan_into(
            flat(out_BX), x, projected, *map(flat, of_steps), tuple(part.stride(0) for part in of_steps), *sequences,
            memory.states, memory.state_row, self.rate, self.bias, self.skip, self.sizes,
        )  # fmt: skip
