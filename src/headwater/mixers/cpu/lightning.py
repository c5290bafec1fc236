"""Decoding of lightning attention by a kernel. B decoding sequences, X heads · width."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headwater.kernels import lightning
from headwater.kernels.arrays import flat
from headwater.mixers.batch import StepBatch
from headwater.mixers.cpu.memory import Array, Memory, padded
from headwater.mixers.lightning import LightningAttention

NOTHING: Array = np.empty(0, np.float32)


class LightningAttentionKernel:
    """The kernel with the layer's weights."""

    def __init__(self, mixer: LightningAttention) -> None:
        s = mixer.shape
        self.rotation, self.norm = mixer.rotation, padded(mixer.norm_QX)
        self.decays = mixer.decays.power_PH[1].clone().numpy()
        of_queries_keys = mixer.qk_norm_21K
        self.qk_norm = NOTHING if of_queries_keys is None else np.concatenate([padded(w) for w in of_queries_keys])
        pairs = 0 if s.rotary is None else s.rotary.dim // 2
        self.sizes = (s.heads, s.head_dim, s.norm_groups, pairs)
        self.scale, self.eps = float(s.scale), s.norm_eps

    def decode_into(self, out_BX: Tensor, products: tuple[Tensor, ...], batch: StepBatch, memory: Memory) -> None:
        mixed_BC, gate_BX = products
        turns = NOTHING if self.rotation is None else flat(self.rotation.at(batch.position_N)[batch.decode_rows])
        lightning.decode_into(
            flat(out_BX), flat(mixed_BC), flat(gate_BX), (mixed_BC.stride(0), gate_BX.stride(0)), turns,
            *batch.decode_sequences, memory.states, memory.state_row,
            self.decays, self.qk_norm, self.norm, self.sizes, self.scale, self.eps,
        )  # fmt: skip
