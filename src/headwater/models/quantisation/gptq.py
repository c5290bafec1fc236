"""GPTQ: integers of 2, 4 or 8 bits in words along the inputs, with scales and zeros of groups of inputs.

Frantar, Ashkboos, Hoefler and Alistarh, 2022. Tensors of a module, as AutoGPTQ and GPTQModel write them: `qweight`
[K · bits / 32, N], `qzeros` [X, N · bits / 32], `scales` [X, N], `g_idx` [K]. The first format stores zeros less 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headwater.config_keys import ConfigKeys
from headwater.mixers.quantised import Quantised
from headwater.models.families.quantised import GPTQ_FORMATS
from headwater.models.quantisation.method import bits_of, check_order, check_shape, unpacked


class Gptq:
    """Reader of GPTQ's weights; bits and groups follow from the tensors' shapes."""

    marks = ("qweight",)
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, keys: ConfigKeys) -> None:
        first = (keys.optional("checkpoint_format") or GPTQ_FORMATS[0]) == GPTQ_FORMATS[0]
        self.less = 1 if first else 0  # how much smaller zeros are stored

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        bits = bits_of(len(parts["qweight"]), n_in, "qweight")
        word_WN = check_shape("qweight", parts["qweight"], n_in * bits // 32, n_out)
        scale_XN = check_shape("scales", parts["scales"], len(parts["scales"]), n_out)
        groups = len(scale_XN)
        word_XV = check_shape("qzeros", parts["qzeros"], groups, n_out * bits // 32)
        check_order(parts.get("g_idx"), groups)
        zero_XN = (unpacked(word_XV, bits) + self.less) & (2**bits - 1)
        return Quantised(unpacked(word_WN.T, bits), bits, scale_XN.T.contiguous(), zero_XN.T.contiguous())
