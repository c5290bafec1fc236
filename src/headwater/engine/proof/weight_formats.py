"""Formats of weights that the self-check tries: those that a model's products may read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from headwater.kernels import NF4
from headwater.mixers.products import Weight
from headwater.models.quantiser import BITS, in_float8, quantised
from headwater.spec import FLOAT8, ModelSpec

FLOATS, INTEGERS = "codes of 16 floats", "codes of 16 integers"  # formats as well as `BITS` and float8


def weights_of(spec: ModelSpec, weight_NK: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Weight]]:
    """Yield a weight in each format that the model's weights may have, with its name."""
    for stored in dict.fromkeys((dtype, torch.bfloat16)):
        yield str(stored).removeprefix("torch."), weight_NK.to(stored)
    for name in formats_of(spec):
        packed = pack(name, weight_NK)
        if packed is not None:
            yield name, packed


def pack(name: str, weight_NK: torch.Tensor) -> Weight | None:
    """Pack a weight in a format of 8 bits or fewer; None if the format does not take its inputs."""
    if name in (FLOATS, INTEGERS):
        return _with_table(name, weight_NK)
    return in_float8(weight_NK) if name == FLOAT8 else quantised(weight_NK, BITS[name])


def _with_table(name: str, weight_NK: torch.Tensor) -> Weight | None:
    """Pack a weight in codes of 4 bits that stand for 16 floats or integers; which ones does not matter."""
    plain = quantised(weight_NK, 4)
    if plain is None:
        return None
    if name == INTEGERS:
        return replace(plain, table=tuple(range(0, 256, 17)))
    return replace(plain, table=NF4, scale_NX=plain.scale_NX.float(), zero_NX=plain.zero_NX[:, :1] * 0)


def formats_of(spec: ModelSpec) -> tuple[str, ...]:
    """Return the formats of 8 bits and fewer that products may read: a quantised file may mix several."""
    if spec.weights != "auto":
        return tuple(dict.fromkeys((spec.weights, spec.table_format or spec.weights)))
    if spec.packed is None:
        return ()
    name = spec.packed.name
    if name == FLOAT8:
        return (FLOAT8,)
    if name.startswith("int"):
        return tuple(BITS)
    if name in ("nf4", "fp4"):
        return (FLOATS,)
    return (*BITS, INTEGERS, FLOAT8) if name == "nvfp4" else (*BITS, INTEGERS)
