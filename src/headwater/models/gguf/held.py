"""Bytes that weights of a GGUF file take as they are held, by the types of its tensors. No torch."""

from __future__ import annotations

from collections import Counter
from math import prod

from headwater.errors import CheckpointError
from headwater.models.gguf.file import GgufHeader, TensorPlace
from headwater.spec import Packed

FLOAT32 = 0  # a tensor's type
# Name of a type, and bytes of an element as held in panels: codes above 4 bits take a byte, scales of whole blocks of
# the K types 4 bytes.
HELD = {
    FLOAT32: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2),
    2: ("Q4_0", 18 / 32), 3: ("Q4_1", 20 / 32), 6: ("Q5_0", 34 / 32), 7: ("Q5_1", 36 / 32), 8: ("Q8_0", 34 / 32),
    10: ("Q2_K", 168 / 256), 11: ("Q3_K", 164 / 256), 12: ("Q4_K", 152 / 256), 13: ("Q5_K", 280 / 256),
    14: ("Q6_K", 292 / 256), 16: ("IQ2_XXS", 140 / 256), 17: ("IQ2_XS", 148 / 256), 18: ("IQ3_XXS", 140 / 256),
    20: ("IQ4_NL", 18 / 32), 21: ("IQ3_S", 140 / 256), 22: ("IQ2_S", 148 / 256), 23: ("IQ4_XS", 148 / 256),
    39: ("MXFP4", 18 / 32),
}  # fmt: skip
# types that are not read, and the nearest one that is
OTHERS = {
    9: ("Q8_1", "Q8_0"), 19: ("IQ1_S", "IQ2_XXS"), 28: ("F64", "F32"), 29: ("IQ1_M", "IQ2_XXS"),
    34: ("TQ1_0", "Q2_K"), 35: ("TQ2_0", "Q2_K"), 40: ("NVFP4", "MXFP4"),
}  # fmt: skip
PLAIN = (FLOAT32, 1, 30)
TABLES = ("token_embd.weight", "output.weight")


def packed(header: GgufHeader) -> Packed | None:
    """Return how the file's quantised weights are held, named after the type of most of them; None if there are none.

    Float32 tensors of layers, which are norms, convolutions and small gates, are left out. Raises CheckpointError for
    a type that is not read.
    """
    tensors = header.tensors.items()
    for name, place in tensors:
        check_type(name, place)
    tables = [place for name, place in tensors if name in TABLES]
    layers = [place for name, place in tensors if name not in TABLES and len(place.shape) > 1 and place.type != FLOAT32]
    if all(place.type in PLAIN for place in layers):
        return None
    elements: Counter[int] = Counter()
    for place in layers:
        elements[place.type] += prod(place.shape)
    name, _ = HELD[elements.most_common(1)[0][0]]
    return Packed(name, _mean(layers), None if all(place.type in PLAIN for place in tables) else _mean(tables))


def check_type(name: str, place: TensorPlace) -> str:
    """Return a tensor's file and name, for errors. Raises CheckpointError for a type that is not read."""
    what = f"{place.file}: tensor {name!r}"
    if place.type in OTHERS:
        found, nearest = OTHERS[place.type]
        raise CheckpointError(f"{what} is of type {found}, which is not read: take a file with {nearest} in its place")
    if place.type not in HELD:
        known = ", ".join(held for held, _ in HELD.values())
        raise CheckpointError(f"{what} is of type {place.type}, which is not one of {known}")
    return what


def _mean(places: list[TensorPlace]) -> float:
    """Return the mean bytes of an element of some tensors as they are held."""
    held = sum(prod(place.shape) * HELD[place.type][1] for place in places)
    return held / sum(prod(place.shape) for place in places)
