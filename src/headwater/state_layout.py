"""Layouts of a checkpoint and of a tail: where the parts of each layer lie in their bytes. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a checkpoint: a layer's state after all earlier tokens."""

    layer: int
    name: str  # "recurrent", "conv", …
    shape: tuple[int, ...]
    dtype_name: str  # "float32" | "bfloat16" | "float16"
    offset: int  # bytes from the start of the checkpoint

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES_OF_DTYPE[self.dtype_name]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Layout of all layers' states in a checkpoint, one contiguous array of bytes."""

    parts: tuple[StatePart, ...]
    bytes: int

    @classmethod
    def of(cls, parts: list[tuple[int, str, tuple[int, ...], str]], align: int = 64) -> StateLayout:
        """Lay out (layer, name, shape, dtype_name) one after the other, each at a multiple of `align` bytes."""
        placed: list[StatePart] = []
        end = 0
        for layer, name, shape, dtype_name in parts:
            placed.append(StatePart(layer, name, shape, dtype_name, -(-end // align) * align))
            end = placed[-1].offset + placed[-1].bytes
        return cls(tuple(placed), end)

    @property
    def conv_taps(self) -> int:
        """Taps of the widest convolution before a recurrence; 1 if there is none."""
        return 1 + max((part.shape[-1] for part in self.parts if part.name == "conv"), default=0)

    def part(self, layer: int, name: str) -> StatePart:
        """Return the part of that layer and name. Raises KeyError if there is none."""
        for part in self.parts:
            if part.layer == layer and part.name == name:
                return part
        raise KeyError((layer, name))


@dataclass(frozen=True, slots=True)
class TailLayout:
    """Layout of a tail's rows: the last hidden row, then a row for each token, with the inputs of all layers.

    So the rows of fewer tokens are the beginning of the rows of more. Numbers are elements of the model's dtype.
    """

    hidden: int  # width of the hidden row, whose place is reserved in every tail
    element_bytes: int
    widths: tuple[tuple[str, int], ...]  # of each layer its kind, and elements of a token; most layers keep none

    @property
    def width(self) -> int:
        """Elements of a token's row."""
        return sum(width for _, width in self.widths)

    def bytes(self, tokens: int) -> int:
        """Return the bytes of the rows of a tail of `tokens` tokens."""
        return (self.hidden + tokens * self.width) * self.element_bytes

    def bytes_by_kind(self, tokens: int) -> dict[str, int]:
        """Return the bytes of these rows, by the kind of the layer that keeps them, and of the hidden row."""
        found = {"hidden row": self.hidden * self.element_bytes}
        for kind, width in self.widths:
            if width:
                found[kind] = found.get(kind, 0) + tokens * width * self.element_bytes
        return found

    def pages(self, tokens: int, page_bytes: int) -> int:
        """Return the pages that the rows of a tail of `tokens` tokens take."""
        return -(-self.bytes(tokens) // page_bytes)
