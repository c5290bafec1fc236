"""A checkpoint's tensors: one safetensors file or several, mapped into memory and read one tensor at a time.

A module's quantised weight, which several tensors hold, stands among them by the name that it would have in 16 bits.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headwater.errors import CheckpointError
from headwater.mixers.quantised import Quantised
from headwater.mixers.weights import Stored, values_of
from headwater.models.files import INDEX, SINGLE, weight_files, weight_map
from headwater.models.packing import Method
from headwater.unreadable import why_missing, why_unreadable

JOINED = re.compile(r"\b(gate|up)_proj\b")  # what may be one tensor, gate_up_proj
JOINED_ROWS = {  # tensors whose rows may be those of several, one after the other
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
}
JOINED_IN = {part: joined for joined, parts in JOINED_ROWS.items() for part in parts}


class ModelTensors(ABC):
    """A model's tensors by the names of Hugging Face checkpoints, and the dtype and device that it computes on."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def stored(self, name: str, *shape: int) -> Stored:
        """Return a tensor as the file holds it, in the file's dtype or quantised. Raises CheckpointError."""

    @abstractmethod
    def unmap(self) -> None:
        """Close the files, so that pages of theirs that were read leave this process; the next read opens them again.

        A file stays mapped for as long as a view of it lives.
        """

    @abstractmethod
    def unread(self) -> list[str]:
        """Return the names of tensors that were never read."""

    def is_quantised(self, name: str) -> bool:
        """Return whether `stored` returns a weight that a checkpoint's own tool quantised."""
        return False

    def raw(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor in the file's dtype, a quantised one in float32."""
        return values_of(self.stored(name, *shape))


class CheckpointTensors(ModelTensors):
    """Tensors of a folder. A tensor in the file's dtype, on the CPU, is a view of the mapped file."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, method: Method | None = None) -> None:
        super().__init__(dtype, device)
        self._method = method
        self._files: dict[Path, Any] = {}
        self._folder = folder
        self._source = self._locate()
        self._read_names: set[str] = set()

    def _locate(self) -> dict[str, Path]:
        """Return the file that holds each tensor."""
        if weight_files(self._folder) == [SINGLE]:
            single = self._folder / SINGLE
            return dict.fromkeys(self._open(single).keys(), single)
        files = {name: self._folder / file for name, file in weight_map(self._folder / INDEX).items()}
        for path in sorted(set(files.values())):
            self._open(path)
        return files

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            if not path.exists():
                raise CheckpointError(f"{path}: {why_missing(path)}")
            self._files[path] = _or_checkpoint_error(path, lambda: safe_open(str(path), framework="pt"))
        return self._files[path]

    def __contains__(self, name: str) -> bool:
        return name in self._source or self.is_quantised(name)

    def unmap(self) -> None:
        self._files.clear()

    def unread(self) -> list[str]:
        return [name for name in self._source if name not in self._read_names]

    def stored(self, name: str, *shape: int) -> Stored:
        if not self.is_quantised(name):
            return of_shape(self._read(name), shape, f"{self._source[name]}: tensor {name!r}")
        assert self._method is not None
        names = {part: found for part in self._method.parts if (found := self._part(name, part))}
        parts = {part: self._read(found) for part, found in names.items()}
        if len(shape) == 2:
            return self._of_parts(name, parts, *shape)
        for part, tensor in parts.items():
            if tensor.shape[:1] != shape[:1]:
                what = f"{self._source[names[part]]}: tensor {names[part]!r}"
                raise CheckpointError(f"{what} has shape {list(tensor.shape)}, must be of {shape[0]} experts")
        return [
            self._of_parts(name, {part: tensor[e] for part, tensor in parts.items()}, *shape[1:])
            for e in range(shape[0])
        ]

    def is_quantised(self, name: str) -> bool:
        return self._method is not None and any(self._part(name, mark) for mark in self._method.marks)

    def _part(self, name: str, part: str) -> str | None:
        """Return the name of a part of a quantised weight: after a module's name, or after that of stacked experts.

        `experts.down_proj` has `experts.down_proj_scale_inv`, of all experts.
        """
        if name.endswith(".weight"):
            named = [name.removesuffix("weight") + part]
        elif "experts." in name:
            named = [f"{name}_{part}", f"{name}_{part.removeprefix('weight_')}", *[name] * (part == "weight")]
        else:
            return None
        return next((one for one in named if one in self._source), None)

    def _of_parts(self, name: str, parts: Mapping[str, torch.Tensor], n_out: int, n_in: int) -> Quantised:
        assert self._method is not None
        try:
            weight = self._method.read(parts, n_out, n_in)
            if weight.shape != (n_out, n_in):  # words of another width than the method's
                types = ", ".join(f"{part} of {tensor.dtype}" for part, tensor in parts.items())
                raise ValueError(f"{weight.shape[0]} by {weight.shape[1]} integers are packed in {types}")
            return weight
        except KeyError as error:
            module = name.removesuffix("weight")
            raise CheckpointError(f"{self._folder}: tensor {module + error.args[0]!r} is missing") from error
        except ValueError as error:
            where = self._source[self._part(name, next(iter(parts))) or name]
            raise CheckpointError(f"{where}: quantised weight {name!r}, {n_out} by {n_in}: {error}") from error

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._source:
            raise CheckpointError(f"{self._folder}: tensor {name!r} is missing from the checkpoint")
        path = self._source[name]
        file = self._open(path)
        self._read_names.add(name)
        theirs = self._name_in_file(name)
        tensor: torch.Tensor = _or_checkpoint_error(path, lambda: file.get_tensor(theirs), f"tensor {theirs!r}: ")
        return tensor

    def _name_in_file(self, name: str) -> str:
        """Return the file's name of a tensor, if it is renamed."""
        return name


class PartTensors(Mapping[str, Stored]):
    """The tensors of one layer by Headwater's names; each is read, and its shape checked, at its first use.

    `names` are (ours, the checkpoint's) for those beginnings or whole names that differ; of several for one of ours,
    the first that there is. Gate and up of an MLP may be one tensor, gate first: `gate_up_proj.weight`, of a shared
    expert `shared_expert.gate_up_proj…`; so may others (`JOINED_ROWS`).
    Experts stand stacked (`experts.gate_proj`, or `experts.gate_up_proj`, and `experts.down_proj`), or one by one:
    `experts.0.gate_proj.weight`, where what follows the number is renamed as `expert.gate_proj`. In stacked ones that
    are `interleaved`, as `Part` describes it, gate and up alternate. Biases of stacked ones: `experts.down_proj_bias`.
    """

    def __init__(
        self,
        tensors: ModelTensors,
        prefix: str,
        shapes: Mapping[str, tuple[int, ...]],
        names: tuple[tuple[str, str], ...] = (),
        interleaved: bool = False,
    ) -> None:
        self._tensors, self._prefix, self._shapes, self._names = tensors, prefix, shapes, names
        self._interleaved = interleaved and prefix + self._theirs("experts.gate_up_proj") in tensors

    def __getitem__(self, name: str) -> Stored:
        """Return a tensor as the checkpoint holds it, in the file's dtype or quantised."""
        shape = self._shapes[name]
        if name.startswith("experts."):
            return self._of_experts(name, shape)
        if name.partition(".")[0] in JOINED_IN:
            return self._whole_or_rows(name, shape)
        if name == "conv1d.weight" and "in_proj_q.weight" in self._shapes:
            return self._convolution_apart(name, shape)
        return self._whole_or_half(name, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def _theirs(self, name: str) -> str:
        fits = [
            theirs + name[len(ours) :] for ours, theirs in self._names if name == ours or name.startswith(f"{ours}.")
        ]
        return next((theirs for theirs in fits if self._prefix + theirs in self._tensors), fits[0] if fits else name)

    def _whole_or_half(self, name: str, shape: tuple[int, ...], dim: int = 0) -> Stored:
        """Return the tensor, or half of a tensor that holds gate and up one after the other in that dimension."""
        whole = self._prefix + self._theirs(name)
        joined = self._prefix + self._theirs(JOINED.sub("gate_up_proj", name))
        half = JOINED.search(name)
        if half is None or whole in self._tensors or joined not in self._tensors:
            return self._tensors.stored(whole, *shape)
        both = self._tensors.stored(joined, *shape[:dim], 2 * shape[dim], *shape[dim + 1 :])
        return cut(both, [shape[dim]] * 2, dim)[half[1] == "up"]

    def _whole_or_rows(self, name: str, shape: tuple[int, ...]) -> Stored:
        """Return the tensor, or its rows of a tensor that holds several, as `JOINED_ROWS` has them."""
        kind, _, of = name.partition(".")
        whole, joined = self._prefix + self._theirs(name), self._prefix + self._theirs(f"{JOINED_IN[kind]}.{of}")
        if whole in self._tensors or joined not in self._tensors:
            return self._tensors.stored(whole, *shape)
        parts = JOINED_ROWS[JOINED_IN[kind]]
        rows = [self._shapes[f"{part}.{of}"][0] for part in parts]
        return cut(self._tensors.stored(joined, sum(rows), *shape[1:]), rows)[parts.index(kind)]

    def _convolution_apart(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the taps of queries, keys and values, which are three tensors: transformers 5.24 writes equal ones."""
        rows = [self._shapes[f"in_proj_{part}.weight"][0] for part in "qkv"]
        names = [f"{self._prefix}{part}_{name}" for part in "qkv"]
        try:
            parts = [self._tensors.raw(name, n, *shape[1:]) for name, n in zip(names, rows, strict=True)]
        except CheckpointError:
            parts = [self._tensors.raw(name, sum(rows) // 3, *shape[1:]) for name in names]
        return torch.cat(parts)

    def _of_experts(self, name: str, shape: tuple[int, ...]) -> Stored:
        """Return stacked weights [E, outputs, inputs], or a list of quantised ones, whichever way they are held."""
        stacked = name.removesuffix(".weight").replace(".bias", "_bias")
        if self._interleaved:
            return self._of_interleaved(stacked, shape)
        kind, first = stacked.removeprefix("experts."), self._prefix + self._theirs("experts")
        theirs = self._theirs(f"expert.{kind}").removeprefix("expert.")
        if f"{first}.0.{theirs}.weight" not in self._tensors:
            return self._whole_or_half(stacked, shape, dim=1)
        experts = [self._tensors.stored(f"{first}.{e}.{theirs}.weight", *shape[1:]) for e in range(shape[0])]
        quantised = [expert for expert in experts if isinstance(expert, Quantised)]
        if len(quantised) == len(experts):
            return [*quantised]
        return torch.stack([values_of(expert) for expert in experts])

    def _of_interleaved(self, name: str, shape: tuple[int, ...]) -> Stored:
        """Return weights or biases of experts whose gate and up alternate; inputs precede outputs unless quantised."""
        half = re.search(r"(gate|up)_proj", name)
        whole = self._prefix + self._theirs(re.sub(r"(gate|up)_proj", "gate_up_proj", name))
        n_out, inputs = shape[1] * (2 if half else 1), shape[2:]
        if self._tensors.is_quantised(whole) or not inputs:
            both = self._tensors.stored(whole, shape[0], n_out, *inputs)
        else:
            both = self._tensors.raw(whole, shape[0], *inputs, n_out).transpose(1, 2)
        at = slice(half[1] == "up", None, 2) if half else slice(None)
        if isinstance(both, list):
            return [expert.rows(at) if isinstance(expert, Quantised) else expert[at] for expert in both]
        return values_of(both)[:, at]


def of_shape(tensor: torch.Tensor, shape: Sequence[int], what: str) -> torch.Tensor:
    """Return a view of the wanted shape. One of the two may have dimensions of size 1 that the other lacks.

    Raises CheckpointError for other shapes, and if dimensions of size 1 stand at other places: [C, K, 1], as MLX writes
    it, is not [C, 1, K].
    """
    found, wanted = list(tensor.shape), list(shape)
    if [n for n in found if n != 1] != [n for n in wanted if n != 1] or (len(found) == len(wanted) and found != wanted):
        of_mlx = "; this is the order of MLX, whose files name it in their metadata" if found[-1:] == [1] else ""
        raise CheckpointError(f"{what} has shape {found}, the config asks for {wanted}{of_mlx}")
    return tensor.view(wanted)


def cut(weight: Stored, sizes: list[int], dim: int = 0) -> Sequence[Stored]:
    """Cut the outputs into runs of these sizes; `dim` is that of the outputs, 1 if the weight is of several experts."""
    if isinstance(weight, torch.Tensor):
        parts: tuple[torch.Tensor, ...] = weight.split(sizes, dim)
        return parts
    if isinstance(weight, Quantised):
        return weight.split(sizes)
    return [list(part) for part in zip(*(expert.split(sizes) for expert in weight), strict=True)]


def _or_checkpoint_error(path: Path, read: Callable[[], Any], what: str = "") -> Any:
    try:
        return read()
    except (SafetensorError, OSError, RuntimeError) as error:
        why = why_unreadable(path) if path.is_file() else ""
        raise CheckpointError(f"{path}: {what}{error}{f'; {why}' if why else ''}") from error
