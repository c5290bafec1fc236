"""Check of a checkpoint before its download, from its config.json and the names and shapes in its files' headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch

from headwater.errors import CheckpointError
from headwater.models.bitsandbytes import ABSMAX, check_rows
from headwater.models.families import read_folder
from headwater.models.files import weight_files
from headwater.models.hub import Listing
from headwater.models.tensors import ModelTensors, PartTensors


class HeaderTensors(ModelTensors):
    """Tensors without content. A weight of 4 bits by bitsandbytes is checked when it is read."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__(torch.float32, torch.device("meta"))
        self._shapes = shapes

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def stored(self, name: str, *shape: int) -> torch.Tensor:
        scales = self._shapes.get(name.removesuffix("weight") + ABSMAX)
        if scales is not None:
            try:
                check_rows("bitsandbytes", prod(shape) // max(1, prod(scales)), shape[-1])
            except ValueError as error:
                raise CheckpointError(f"{name}: {error}") from error
        return torch.empty(shape, device=self.device)

    def unmap(self) -> None:
        """Do nothing: no file is open."""

    def unread(self) -> list[str]:
        return []


def check_headers(listing: Listing, folder: Path) -> None:
    """Read all layers of a model on a hub without their content; `folder` has its config.json and index.

    Raises CheckpointError for blocks of weights that cross rows, and DownloadError.
    """
    spec, tensors = read_folder(folder), HeaderTensors(listing.shapes(weight_files(folder, listing.files)))
    prefix = next((p for p in spec.prefixes if p + spec.embedding in tensors), spec.prefixes[0])
    for part in spec.parts:
        named = PartTensors(tensors, f"{prefix}{part.at}.", part.layer.tensors(), part.names, part.interleaved)
        for name in named:
            named[name]
