"""compressed-tensors: integers of 4 or 8 bits, packed or not, or float8 numbers; scales of groups, outputs or blocks.

The format of llm-compressor. Tensors of a module: `weight_packed` [N, K · bits / 32] of unsigned integers, signed ones
plus 2^(bits − 1), or `weight` [N, K] of int8 or float8; `weight_scale` [N, X]; for asymmetric groups
`weight_zero_point`, packed along the outputs, [N · bits / 32, X], or plain. Scales of activations and of KV are left
out: neither is rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwater.config_keys import ConfigKeys
from headwater.mixers.quantised import Quantised
from headwater.models.families.quantised import block_of, groups_of
from headwater.models.quantisation.method import (
    bits_of,
    check_order,
    check_shape,
    float8,
    scale_by_row,
    unpacked,
    zeros,
)

PACKED, SCALE, ZERO = "weight_packed", "weight_scale", "weight_zero_point"


class Compressed:
    """Reader of weights of compressed-tensors; what a module has follows from its tensors."""

    marks = (PACKED, SCALE)
    parts = ("weight", PACKED, SCALE, ZERO, "weight_g_idx", "weight_shape", "input_scale", "input_zero_point")

    def __init__(self, keys: ConfigKeys) -> None:
        weights = (ConfigKeys(group.optional("weights") or {}) for group in groups_of(keys))
        self.block = next((block for block in (block_of(w, "block_structure") for w in weights) if block), None)

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        blocked = self.block if len(parts[SCALE]) not in (1, n_out) else None
        scale_NX = scale_by_row(parts[SCALE], n_out, n_in, blocked, SCALE)
        check_order(parts.get("weight_g_idx"), scale_NX.shape[1])
        if PACKED in parts:
            bits = bits_of(parts[PACKED].shape[1], n_in, PACKED)
            code_NK = unpacked(check_shape(PACKED, parts[PACKED], n_out, n_in * bits // 32), bits)
            return Quantised(code_NK, bits, scale_NX, _zeros(parts.get(ZERO), bits, n_out))
        weight_NK = check_shape("weight", parts["weight"], n_out, n_in)
        if weight_NK.dtype == torch.float8_e4m3fn:
            return float8(weight_NK, scale_NX)
        if weight_NK.dtype != torch.int8:
            raise ValueError(f"weight is of {weight_NK.dtype}, must be of torch.int8 or {torch.float8_e4m3fn}")
        return Quantised(_unsigned(weight_NK, 8), 8, scale_NX, _zeros(parts.get(ZERO), 8, n_out))


def _zeros(zero: Tensor | None, bits: int, n_out: int) -> Tensor:
    """Return zeros [N, X] of unsigned codes."""
    if zero is None:
        return zeros(n_out, 2 ** (bits - 1))
    if zero.dtype == torch.int32:
        return unpacked(zero.T, bits).T[:n_out].contiguous()
    plain = _unsigned(zero, bits)
    return plain.expand(n_out, 1).contiguous() if zero.numel() == 1 else plain.reshape(n_out, -1)


def _unsigned(signed: Tensor, bits: int) -> Tensor:
    code: Tensor = signed.to(torch.int16) + 2 ** (bits - 1)
    return code.to(torch.uint8)
