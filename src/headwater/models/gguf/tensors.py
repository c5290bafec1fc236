"""Tensors of a GGUF file by the names of Hugging Face checkpoints, mapped into memory and read one at a time.

Their types are plain numbers, or blocks of integers with scales (ggml's quants). Formulas: ggml-quants.c of
github.com/ggml-org/ggml, in float32 as there. A block's fields stand one after the other.

N outputs, B blocks in a row, Y bytes of a block, G groups of a block; d scale and m minimum of a block, float16.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.errors import CheckpointError
from headwater.mixers.quantised import Quantised
from headwater.mixers.weights import Stored
from headwater.models.gguf.file import TensorPlace, read_header
from headwater.models.gguf.names import sources
from headwater.models.tensors import ModelTensors, of_shape

SUPER = 256  # inputs of a block with groups: of the K formats
GROUPS = 8  # of 32 inputs, in Q4_K and Q5_K


@dataclass(frozen=True)
class Blocks:
    """Type of a tensor: bytes of a block, and its reader."""

    name: str
    inputs: int  # of a block
    bytes: int  # of a block
    read: Callable[[Tensor], Quantised]  # of uint8 [N, B, Y]


@dataclass(frozen=True)
class Plain:
    """Type of a tensor whose numbers stand as they are."""

    name: str
    dtype: torch.dtype


def _half(block_NBY: Tensor, at: int) -> Tensor:
    """Return the float16 number at a byte of each block, [N, B]."""
    return block_NBY[:, :, at : at + 2].contiguous().view(torch.float16)[:, :, 0]


def _zero(block_NBY: Tensor, zero: int) -> Tensor:
    return torch.full((len(block_NBY), 1), zero, dtype=torch.uint8)


def _nibbles(byte: Tensor) -> Tensor:
    """Return the lower four bits of some bytes, then the higher ones of the same bytes."""
    return torch.cat([byte & 15, byte >> 4], -1)


def _fifth_bits(block_NBY: Tensor, at: int) -> Tensor:
    """Return 32 bits, the lowest of the first byte first, each as 0 or 16."""
    shift_8 = torch.arange(8, dtype=torch.uint8)
    return ((block_NBY[:, :, at : at + 4, None] >> shift_8) & 1).flatten(2) << 4


def _q4_0(block_NBY: Tensor) -> Quantised:
    return Quantised(_nibbles(block_NBY[:, :, 2:]).flatten(1), 4, _half(block_NBY, 0), _zero(block_NBY, 8))


def _q4_1(block_NBY: Tensor) -> Quantised:
    d_NB, m_NB = _half(block_NBY, 0), _half(block_NBY, 2)
    return Quantised(_nibbles(block_NBY[:, :, 4:]).flatten(1), 4, d_NB, _zero(block_NBY, 0), -m_NB)


def _q5_0(block_NBY: Tensor) -> Quantised:
    code_NK = (_nibbles(block_NBY[:, :, 6:]) | _fifth_bits(block_NBY, 2)).flatten(1)
    return Quantised(code_NK, 5, _half(block_NBY, 0), _zero(block_NBY, 16))


def _q5_1(block_NBY: Tensor) -> Quantised:
    code_NK = (_nibbles(block_NBY[:, :, 8:]) | _fifth_bits(block_NBY, 4)).flatten(1)
    return Quantised(code_NK, 5, _half(block_NBY, 0), _zero(block_NBY, 0), -_half(block_NBY, 2))


def _q8_0(block_NBY: Tensor) -> Quantised:
    """Signed integers; less 128, a byte is the same with its highest bit turned."""
    return Quantised((block_NBY[:, :, 2:] ^ 128).flatten(1), 8, _half(block_NBY, 0), _zero(block_NBY, 128))


def _six_bits(byte_NB12: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minimums of 8 groups, 6 bits each, from 12 bytes: [N, B · 8]."""
    first, second, third = byte_NB12.split(4, -1)
    scale_NBG = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    minimum_NBG = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], -1)
    return scale_NBG.flatten(1), minimum_NBG.flatten(1)


def _of_groups(block_NBY: Tensor, code_NK: Tensor, bits: int) -> Quantised:
    """Return a weight whose blocks begin with d, m and 12 bytes of scales and minimums of groups."""
    scale_NX, minimum_NX = _six_bits(block_NBY[:, :, 4:16])
    outer = _half(block_NBY, 0), _half(block_NBY, 2)
    return Quantised(code_NK, bits, scale_NX, _zero(block_NBY, 0), minimum_NX, *outer)


def _q4_k(block_NBY: Tensor) -> Quantised:
    of_pair = _nibbles(block_NBY[:, :, 16:].unflatten(2, (GROUPS // 2, -1)))
    return _of_groups(block_NBY, of_pair.flatten(1), 4)


def _q5_k(block_NBY: Tensor) -> Quantised:
    of_group = _nibbles(block_NBY[:, :, 48:].unflatten(2, (GROUPS // 2, -1))).unflatten(3, (2, -1)).flatten(2, 3)
    shift_G1 = torch.arange(GROUPS, dtype=torch.uint8)[:, None]
    fifth = ((block_NBY[:, :, None, 16:48] >> shift_G1) & 1) << 4
    return _of_groups(block_NBY, (of_group | fifth).flatten(1), 5)


def _q6_k(block_NBY: Tensor) -> Quantised:
    """Lower four bits [2, 64], higher two bits [2, 32], 16 scales of int8, d; halves of 128 inputs."""
    low = _nibbles(block_NBY[:, :, :128].unflatten(2, (2, -1)))
    shift_41 = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = ((block_NBY[:, :, 128:192].unflatten(2, (2, 1, -1)) >> shift_41) & 3).flatten(3) << 4
    scale_NX = block_NBY[:, :, 192:208].contiguous().view(torch.int8).flatten(1)
    code_NK = (low | high).flatten(1)
    return Quantised(code_NK, 6, scale_NX, _zero(block_NBY, 32), outer_scale_NS=_half(block_NBY, 208))


TYPES: dict[int, Blocks | Plain] = {
    0: Plain("F32", torch.float32),
    1: Plain("F16", torch.float16),
    2: Blocks("Q4_0", 32, 18, _q4_0),
    3: Blocks("Q4_1", 32, 20, _q4_1),
    6: Blocks("Q5_0", 32, 22, _q5_0),
    7: Blocks("Q5_1", 32, 24, _q5_1),
    8: Blocks("Q8_0", 32, 34, _q8_0),
    12: Blocks("Q4_K", SUPER, 144, _q4_k),
    13: Blocks("Q5_K", SUPER, 176, _q5_k),
    14: Blocks("Q6_K", SUPER, 210, _q6_k),
    30: Plain("BF16", torch.bfloat16),
}
OTHERS = {  # types that are not read, by name
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


class GgufTensors(ModelTensors):
    """Tensors of one file. A plain tensor that no converter changed is a view of the mapped file."""

    def __init__(self, path: Path, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._header = read_header(path)
        self._sources = sources(self._header.architecture, config)
        self._read_names: set[str] = set()
        self._mapped: mmap.mmap | None = None
        for name, place in self._header.tensors.items():
            self._check(name, place)

    def __contains__(self, name: str) -> bool:
        return name in self._sources and self._sources[name][0] in self._header.tensors

    @property
    def _content(self) -> mmap.mmap:
        if self._mapped is None:
            with self._header.path.open("rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._mapped

    def unmap(self) -> None:
        self._mapped = None

    def unread(self) -> list[str]:
        return [name for name in self._header.tensors if name not in self._read_names]

    def stored(self, name: str, *shape: int) -> Stored:
        theirs, change = self._sources.get(name, (name, None))
        if change is None or theirs not in self._header.tensors:
            raise CheckpointError(f"{self._header.path}: tensor {theirs!r} is missing from the file")
        self._read_names.add(theirs)
        place = self._header.tensors[theirs]
        of_experts = len(place.shape) > 2 and not isinstance(TYPES[place.type], Plain)
        what = f"{self._header.path}: tensor {theirs!r}"
        if of_experts:
            _check_shape(what, place.shape, shape)
            return [self._quantised(place, e) for e in range(shape[0])]
        weight = change(self._numbers(place) if isinstance(TYPES[place.type], Plain) else self._quantised(place))
        if isinstance(weight, torch.Tensor):
            return of_shape(weight, shape, what)
        _check_shape(what, tuple(weight.shape), shape)
        return weight

    def _check(self, name: str, place: TensorPlace) -> None:
        """Raise CheckpointError for a tensor that cannot be read, or that the file does not hold as a whole."""
        what = f"{self._header.path}: tensor {name!r}"
        if place.type not in TYPES:
            known = ", ".join(kind.name for kind in TYPES.values())
            raise CheckpointError(
                f"{what} is of type {OTHERS.get(place.type, place.type)}, which is not one of {known}"
            )
        kind = TYPES[place.type]
        if not isinstance(kind, Plain) and place.shape[-1] % kind.inputs:
            raise CheckpointError(f"{what} has {place.shape[-1]} inputs, blocks of {kind.name} have {kind.inputs}")
        end = place.start + _bytes(place)
        if end > len(self._content):
            size = len(self._content)
            raise CheckpointError(f"{what} ends at byte {end:,} of a file of {size:,}: the download was cut off")

    def _numbers(self, place: TensorPlace) -> torch.Tensor:
        kind = TYPES[place.type]
        assert isinstance(kind, Plain)
        n = prod(place.shape)
        return torch.frombuffer(self._content, dtype=kind.dtype, count=n, offset=place.start).view(place.shape)

    def _quantised(self, place: TensorPlace, expert: int = 0) -> Quantised:
        """Return the weight [N, K], of one expert if there are several."""
        kind = TYPES[place.type]
        assert not isinstance(kind, Plain)
        n_out, n_in = place.shape[-2:]
        blocks = n_in // kind.inputs
        size = n_out * blocks * kind.bytes
        start = place.start + expert * size
        byte = torch.frombuffer(self._content, dtype=torch.uint8, count=size, offset=start)
        return kind.read(byte.view(n_out, blocks, kind.bytes))


def _bytes(place: TensorPlace) -> int:
    kind, n = TYPES[place.type], prod(place.shape)
    return n * kind.dtype.itemsize if isinstance(kind, Plain) else n // kind.inputs * kind.bytes


def _check_shape(what: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if [n for n in found if n != 1] != [n for n in wanted if n != 1]:
        raise CheckpointError(f"{what} has shape {list(found)}, the metadata ask for {list(wanted)}")
