"""AWQ: integers of 4 bits in words along the outputs, interleaved, with scales and zeros of groups of inputs.

Lin, Tang, Tang, Yang, Dang and Han, 2023. Tensors of a module, as AutoAWQ writes them (version "gemm"): `qweight`
[K, N / 8], `qzeros` [X, N / 8], `scales` [X, N].
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headwater.mixers.quantised import Quantised
from headwater.models.quantisation.method import check_shape, unpacked

BITS = 4
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of outputs 0 to 7 in a word, from the lowest bits


class Awq:
    """Reader of AWQ's weights; groups follow from the tensors' shapes."""

    marks = ("qweight",)
    parts = ("qweight", "qzeros", "scales")

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        scale_XN = check_shape("scales", parts["scales"], len(parts["scales"]), n_out)
        word_KV = check_shape("qweight", parts["qweight"], n_in, n_out // 8)
        word_XV = check_shape("qzeros", parts["qzeros"], len(scale_XN), n_out // 8)
        code_NK, zero_NX = (_in_order(word).T.contiguous() for word in (word_KV, word_XV))
        return Quantised(code_NK, BITS, scale_XN.T.contiguous(), zero_NX)


def _in_order(word_RV: Tensor) -> Tensor:
    code_RV8 = unpacked(word_RV, BITS).unflatten(1, (-1, len(PLACES)))
    code_RN: Tensor = code_RV8[:, :, PLACES].flatten(1)
    return code_RN
