"""FP8: float8 numbers (e4m3) with a scale for each block of outputs and inputs, or for each output, or for all.

DeepSeek-V3 Technical Report, 2024, section 3.3.2. Tensors of a module: `weight` [N, K], and `weight_scale_inv`, which
multiplies it in spite of its name, [N / 128, K / 128]; other tools write `weight_scale`. Scales of activations
(`input_scale`) are left out: activations are not rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwater.config_keys import ConfigKeys
from headwater.mixers.quantised import Quantised
from headwater.models.families.quantised import block_of
from headwater.models.quantisation.method import check_shape, float8, scale_by_row


class Fp8:
    """Reader of float8 weights."""

    marks = ("weight_scale_inv", "weight_scale")
    parts = ("weight", *marks, "input_scale", "activation_scale")

    def __init__(self, keys: ConfigKeys) -> None:
        self.block = block_of(keys, "weight_block_size")

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        code_NK = check_shape("weight", parts["weight"], n_out, n_in)
        if code_NK.dtype != torch.float8_e4m3fn:
            raise ValueError(f"weight is of {code_NK.dtype}, must be of {torch.float8_e4m3fn}")
        name = next(mark for mark in self.marks if mark in parts)
        scale_NX = scale_by_row(parts[name], n_out, n_in, self.block, name)
        return float8(code_NK, scale_NX.float())
