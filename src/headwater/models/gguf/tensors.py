"""Tensors of a GGUF file by the names of Hugging Face checkpoints, mapped into memory and read one at a time.

Their types are plain numbers, or blocks of integers with scales (ggml's quants). Formulas: ggml-quants.c of
github.com/ggml-org/ggml, in float32 as there. A block's fields stand one after the other.

N outputs, B blocks in a row, Y bytes of a block, G groups of a block; d scale and m minimum of a block, float16.
"""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path
from typing import Any

import torch

from headwater.config_keys import BROKEN
from headwater.errors import CheckpointError
from headwater.mixers.quantised import Quantised
from headwater.mixers.weights import Stored
from headwater.models.gguf.blocks import TYPES, Plain, bytes_of
from headwater.models.gguf.file import TensorPlace, read_header
from headwater.models.gguf.held import check_type
from headwater.models.gguf.names import sources
from headwater.models.tensors import ModelTensors, of_shape

HALVES = {"attn_kv_b.weight": ("attn_k_b.weight", "attn_v_b.weight")}  # of a weight that converters split


class GgufTensors(ModelTensors):
    """Tensors of one file, or of its parts. A plain tensor that no converter changed is a view of the mapped file."""

    def __init__(self, path: Path, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._header = read_header(path)
        self._sources = sources(self._header.architecture, config)
        self._read_names: set[str] = set()
        self._mapped: dict[Path, mmap.mmap] = {}
        for name, place in self._header.tensors.items():
            self._check(name, place)

    def __contains__(self, name: str) -> bool:
        theirs = self._sources[name][0] if name in self._sources else name
        return theirs in self._header.tensors or self._halves(theirs) != []

    def _content(self, path: Path) -> mmap.mmap:
        if path not in self._mapped:
            with path.open("rb") as file:
                self._mapped[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._mapped[path]

    def unmap(self) -> None:
        self._mapped.clear()

    def unread(self) -> list[str]:
        rotation = (
            "rope_freqs.weight",
            "rope_factors_long.weight",
            "rope_factors_short.weight",
        )  # in the configuration
        return [name for name in self._header.tensors if name not in self._read_names and name not in rotation]

    def stored(self, name: str, *shape: int) -> Stored:
        theirs, change = self._sources.get(name, (name, None))
        if halves := self._halves(theirs):
            return of_shape(joined(*map(self._values, halves)), shape, f"{self._header.path}: tensor {halves[0]!r}")
        if change is None or theirs not in self._header.tensors:
            raise CheckpointError(f"{self._header.path}: tensor {theirs!r} is missing from the file")
        self._read_names.add(theirs)
        place = self._header.tensors[theirs]
        of_experts = len(place.shape) > 2 and not isinstance(TYPES[place.type], Plain)
        what = f"{place.file}: tensor {theirs!r}"
        if of_experts:
            _check_shape(what, place.shape, shape)
            return [self._quantised(place, e) for e in range(shape[0])]
        found = self._numbers(place) if isinstance(TYPES[place.type], Plain) else self._quantised(place)
        try:
            weight = change(found)
        except BROKEN as error:
            raise CheckpointError(
                f"{what} has shape {list(place.shape)}, other than the metadata's: {error}"
            ) from error
        if isinstance(weight, torch.Tensor):
            return of_shape(weight, shape, what)
        _check_shape(what, tuple(weight.shape), shape)
        return weight

    def _halves(self, name: str) -> list[str]:
        """Return the names of two tensors that the file has in the place of one; none if it has not."""
        layer, _, of_layer = name.rpartition("blk.")[2].partition(".")
        halves = [f"blk.{layer}.{half}" for half in HALVES.get(of_layer, ())]
        return halves if all(half in self._header.tensors for half in halves) else []

    def _values(self, name: str) -> torch.Tensor:
        """Return the numbers of a tensor of heads, [H, outputs, inputs]."""
        self._read_names.add(name)
        place = self._header.tensors[name]
        if isinstance(TYPES[place.type], Plain):
            return self._numbers(place)
        return torch.stack([self._quantised(place, head).values() for head in range(place.shape[0])])

    def _check(self, name: str, place: TensorPlace) -> None:
        """Raise CheckpointError for a tensor that cannot be read, or that the file does not hold as a whole."""
        what, kind = check_type(name, place), TYPES[place.type]
        if not isinstance(kind, Plain) and place.shape[-1] % kind.inputs:
            raise CheckpointError(f"{what} has {place.shape[-1]} inputs, blocks of {kind.name} have {kind.inputs}")
        end = place.start + bytes_of(place)
        size = len(self._content(place.file))
        if end > size:
            raise CheckpointError(f"{what} ends at byte {end:,} of a file of {size:,}: the download was cut off")

    def _numbers(self, place: TensorPlace) -> torch.Tensor:
        kind = TYPES[place.type]
        assert isinstance(kind, Plain)
        n = prod(place.shape)
        return torch.frombuffer(self._content(place.file), dtype=kind.dtype, count=n, offset=place.start).view(
            place.shape
        )

    def _quantised(self, place: TensorPlace, expert: int = 0) -> Quantised:
        """Return the weight [N, K], of one expert if there are several."""
        kind = TYPES[place.type]
        assert not isinstance(kind, Plain)
        n_out, n_in = place.shape[-2:]
        blocks = n_in // kind.inputs
        size = n_out * blocks * kind.bytes
        start = place.start + expert * size
        byte = torch.frombuffer(self._content(place.file), dtype=torch.uint8, count=size, offset=start)
        return kind.read(byte.view(n_out, blocks, kind.bytes))


def _check_shape(what: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if [n for n in found if n != 1] != [n for n in wanted if n != 1]:
        raise CheckpointError(f"{what} has shape {list(found)}, the metadata ask for {list(wanted)}")


def joined(k_HLN: torch.Tensor, v_HVL: torch.Tensor) -> torch.Tensor:
    """Return keys and values of all heads from a latent row, [H · (N + V), L]; converters transpose those of keys."""
    of_head_HXL = torch.cat([k_HLN.transpose(1, 2), v_HVL], 1)
    return of_head_HXL.flatten(0, 1)
