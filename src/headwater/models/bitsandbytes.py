"""Weights that bitsandbytes has quantised: nf4, fp4, and the int8 of LLM.int8().

N outputs, K inputs, X blocks of a row, M blocks of the weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from headwater.kernels import FP4, NF4
from headwater.mixers.quantised import Quantised
from headwater.models.families.quantised import INSTEAD
from headwater.models.packing import BYTE, check_shape, signed, zeros

ABSMAX, MAP = "weight.absmax", "weight.quant_map"
STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
NESTED_ABSMAX, NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"
ROW_SCALE, LAYOUT = "SCB", "weight_format"
LARGEST = 127  # code of the largest weight of a row


class BitsAndBytes:
    """nf4 (Dettmers et al., 2023) and fp4: codes of 16 floats, scales of blocks; or int8 with a scale for each output.

    Tensors of a module of 4 bits: `weight`, bytes of two codes, the first in the upper bits, of the flattened weight;
    `weight.absmax`, the scale of each block; `weight.quant_map`, the 16 floats; `weight.quant_state…`, JSON with
    `blocksize`. Nested scales are bytes: `nested_quant_map` of the byte times `nested_absmax` of
    `nested_blocksize` blocks, plus `nested_offset`.

    Tensors of an int8 module: `weight` [N, K], and `SCB` [N], the largest weight of each output, which is 127.
    """

    marks = (ABSMAX, ROW_SCALE)
    parts = ("weight", ABSMAX, MAP, NESTED_ABSMAX, NESTED_MAP, *STATES, ROW_SCALE, LAYOUT)

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        if ROW_SCALE in parts:
            return _int8(parts, n_out, n_in)
        state = json.loads(bytes(parts[next((name for name in STATES if name in parts), STATES[0])].tolist()))
        kind, block, table = state["quant_type"], state["blocksize"], tuple(parts[MAP].tolist())
        check_rows(kind, block, n_in)
        if table not in (NF4, FP4):
            raise ValueError(f"{MAP} has other numbers than nf4 and fp4; {INSTEAD}")
        byte = parts["weight"].contiguous().view(torch.uint8).flatten()
        check_shape("weight", byte, n_out * n_in // 2)
        code_NK = torch.stack([byte >> 4, byte & 15], 1).view(n_out, n_in)
        scale_M = check_shape(ABSMAX, _scales(parts, state), n_out * n_in // block)
        return Quantised(code_NK, 4, scale_M.view(n_out, -1), zeros(n_out, 0), table=table)


def check_rows(kind: str, block: int, n_in: int) -> None:
    """Raise ValueError for blocks that do not begin with each row."""
    if n_in % block:
        raise ValueError(f"{kind} has blocks of {block} weights, which cross rows of {n_in}; {INSTEAD}")


def _scales(parts: Mapping[str, Tensor], state: Mapping[str, float]) -> Tensor:
    """Return the scale of each block, float32."""
    if NESTED_ABSMAX not in parts:
        return parts[ABSMAX].float()
    number_M = parts[NESTED_MAP][parts[ABSMAX].to(torch.int64)]
    scale_M = parts[NESTED_ABSMAX].repeat_interleave(int(state["nested_blocksize"]))[: len(number_M)]
    scaled_M: Tensor = number_M * scale_M
    return scaled_M + state["nested_offset"]


def _int8(parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
    weight_NK, scale_N = (
        check_shape("weight", parts["weight"], n_out, n_in),
        check_shape(ROW_SCALE, parts[ROW_SCALE], n_out),
    )
    if LAYOUT in parts and int(parts[LAYOUT]):
        raise ValueError(f"{LAYOUT} is {int(parts[LAYOUT])}, must be 0: rows one after the other")
    return Quantised(signed(weight_NK, BYTE), BYTE, scale_N[:, None].float() / LARGEST, zeros(n_out, 2 ** (BYTE - 1)))
