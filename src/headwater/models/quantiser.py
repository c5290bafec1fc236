"""Quantisation of 16-bit and 32-bit weights to integers of 8 or 4 bits, for `--weights int8` and `int4`.

Rounding to nearest, without calibration data. N outputs, K inputs, X groups of g inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from headwater.errors import CheckpointError
from headwater.layers.layer import Layer
from headwater.mixers.quantised import INPUT_GROUP, Quantised
from headwater.mixers.weights import Stored, values_of
from headwater.models.packing import float8

BITS = {"int8": 8, "int4": 4}
GROUPS = (128, 64)
FLOAT8_GROUP = 128
BLOCK = 2**18  # elements whose intermediates fit in cache
# Parts of a group's range that its codes may span. With few codes, a narrower range cuts the largest weights and rounds
# all others less: 5% less squared error for Gaussian weights at 4 bits, and nothing at 8.
RANGES = (1.0, 0.93, 0.86, 0.79)
MAX_SEARCHED_CODE = 15
Convert = Callable[[str, Callable[[], Tensor], int], Quantised]  # of a weight's name, how it is read, and bits
NORMAL, LARGEST = 2.0**-14, 65504.0  # of float16
Found = TypeVar("Found")


class Each(Protocol):
    """Application of a function to each block of a weight, some rows in float32."""

    def __call__(self, work: Callable[[Tensor], Found], /) -> list[Found]: ...


@dataclass(frozen=True, slots=True)
class Grid:
    """The values of each group's codes 0 to `top`: scale · (code − zero); float32."""

    scale_NX: Tensor
    zero_NX: Tensor
    top: int

    def codes(self, x_NXg: Tensor) -> Tensor:
        """Return the code of the nearest value."""
        code_NXg = torch.div(x_NXg, self.scale_NX[:, :, None]).round_().add_(self.zero_NX[:, :, None])
        return code_NXg.clamp_(0, self.top)

    def error(self, x_NXg: Tensor) -> Tensor:
        """Return the squared error of each group, [N, X]."""
        value_NXg = self.codes(x_NXg).sub_(self.zero_NX[:, :, None]).mul_(self.scale_NX[:, :, None])
        return value_NXg.sub_(x_NXg).square_().sum(-1)


@dataclass(frozen=True, slots=True)
class Form:
    """Groups of some inputs; each has a zero of its own, or the middle code is zero for all."""

    group: int
    has_zeros: bool
    scale_dtype: torch.dtype

    def grid(self, x_NXg: Tensor, top: int, part: float = 1.0) -> Grid:
        """Return the grid that spans `part` of each group's range, with scales as they are stored.

        Without zeros of its own, a group's weight of the largest magnitude gets code 0, from which the middle is one
        further away than from `top`: its scale may be negative.
        """
        low_NX = x_NXg.amin(-1).clamp_max_(0).mul_(part)
        high_NX = x_NXg.amax(-1).clamp_min_(0).mul_(part)
        if self.has_zeros:
            scale_NX = self._stored((high_NX - low_NX).div_(top))
            return Grid(scale_NX, low_NX.neg_().div_(scale_NX).round_().clamp_(0, top), top)
        middle = (top + 1) // 2
        scale_NX = self._stored(torch.where(-low_NX < high_NX, high_NX, low_NX).div_(-middle))
        return Grid(scale_NX, torch.full_like(scale_NX, middle), top)

    def _stored(self, scale_NX: Tensor) -> Tensor:
        """Round scales as they are stored; a group of zeros has scale 1."""
        scale_NX = scale_NX.to(self.scale_dtype).float()
        return scale_NX.masked_fill_(scale_NX == 0, 1.0)


def quantised(weight_NK: Tensor, bits: int) -> Quantised | None:
    """Quantise a weight in the form with the least squared error; None if no group divides its inputs.

    Among forms with equal errors the smallest is chosen. The result depends only on the weight, not on threads. Raises
    ValueError for weights that are not finite.
    """
    top = 2**bits - 1
    with _in_threads(weight_NK) as each_block:
        scale_dtype = _scale_dtype(each_block, top)
        sizes = [group for group in GROUPS if weight_NK.shape[1] % group == 0]
        forms = [Form(group, has_zeros, scale_dtype) for group in sizes for has_zeros in (False, True)]
        if not forms:
            return None
        form = _least(each_block, forms, top)
        blocks = each_block(lambda block_NK: _best(block_NK, form, top))
    code_NK, scale_NX, zero_NX = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return Quantised(code_NK, bits, scale_NX, zero_NX)


def quantised_or_error(name: str, weight_NK: Tensor, bits: int) -> Quantised:
    """Quantise a weight whose inputs a group divides. Raises CheckpointError that names it if it is not finite."""
    try:
        weight = quantised(weight_NK, bits)
    except ValueError as error:
        raise CheckpointError(f"tensor {name!r} cannot be quantised: {error}") from error
    assert weight is not None
    return weight


def converted(name: str, read: Callable[[], Tensor], bits: int) -> Quantised:
    """Read a weight and quantise it. Raises CheckpointError that names it."""
    return quantised_or_error(name, read(), bits)


def in_float8(weight_NK: Tensor) -> Quantised | None:
    """Round a weight to float8 with a scale for each output and 128 inputs, or fewer; None if 8 does not divide them.

    Checks and benchmarks of products take it; checkpoints bring their own.
    """
    group = math.gcd(FLOAT8_GROUP, weight_NK.shape[1])
    if group % INPUT_GROUP:
        return None
    groups_NXg = weight_NK.float().unflatten(1, (-1, group))
    scale_NX = groups_NXg.abs().amax(-1).clamp_(min=NORMAL).div_(torch.finfo(torch.float8_e4m3fn).max)
    code_NXg = groups_NXg.div(scale_NX[:, :, None]).to(torch.float8_e4m3fn)
    return float8(code_NXg.flatten(1), scale_NX)


def _scale_dtype(each_block: Each, top: int) -> torch.dtype:
    """Return float16, or float32 for a weight whose scales may all be below 2^-14, or some beyond 65,504.

    The 11 bits of float16 move the largest weight of a group by a sixteenth of a step at most, in half of the bytes;
    the 8 of bfloat16 would move it by half a step. Below 2^-14 a scale loses digits, but by less than 2^-11 of the
    largest group's step.
    """
    peaks = each_block(lambda block_NK: float(block_NK.abs().max()))
    if not all(map(math.isfinite, peaks)):
        raise ValueError("weights are not finite: some are infinite or NaN, which integers cannot hold")
    step = max(peaks, default=0.0) / top
    return torch.float16 if step == 0 or (step >= NORMAL and 2 * step <= LARGEST) else torch.float32


def _best(block_NK: Tensor, form: Form, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and zeros of some rows, as they are stored; each group has the best of the ranges."""
    x_NXg = block_NK.unflatten(1, (-1, form.group))
    grids = [form.grid(x_NXg, top, part) for part in (RANGES if top <= MAX_SEARCHED_CODE else RANGES[:1])]
    best_1NX = torch.stack([grid.error(x_NXg) for grid in grids]).argmin(0, keepdim=True)
    scale_NX, zero_NX = (
        torch.stack(parts).gather(0, best_1NX)[0]
        for parts in zip(*((g.scale_NX, g.zero_NX) for g in grids), strict=True)
    )
    code_NXg = Grid(scale_NX, zero_NX, top).codes(x_NXg)
    zero_NX = zero_NX if form.has_zeros else zero_NX[:, :1]
    return code_NXg.flatten(1).to(torch.uint8), scale_NX.to(form.scale_dtype), zero_NX.to(torch.uint8)


def _least(each_block: Each, forms: Sequence[Form], top: int) -> Form:
    """Return the first form with the least squared error of the whole weight, with codes over each group's full range.

    Sums are in one order within a row and exact over rows, so that threads do not change the choice.
    """

    def errors(form: Form) -> float:
        def of_rows(block_NK: Tensor) -> list[float]:
            x_NXg = block_NK.unflatten(1, (-1, form.group))
            found: list[float] = form.grid(x_NXg, top).error(x_NXg).double().cumsum(1)[:, -1].tolist()
            return found

        return math.fsum(chain.from_iterable(each_block(of_rows)))

    return min(forms, key=errors)


@contextmanager
def _in_threads(weight_NK: Tensor) -> Iterator[Each]:
    """Yield a function that applies another to each block of a weight, in as many threads as torch uses.

    Each of them computes an operation on its own. OpenMP's threads would wait for each other after each operation, of
    0.1 ms: with another process on the same cores, 0.1 s of them took 4 s.
    """
    n, rows = torch.get_num_threads(), max(1, BLOCK // weight_NK.shape[1])
    try:
        with ThreadPoolExecutor(n, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield lambda work: list(pool.map(lambda block_NK: work(block_NK.float()), weight_NK.split(rows)))
    finally:
        torch.set_num_threads(n)  # the last call also counts for threads that begin later


class QuantisedTensors(Mapping[str, Stored]):
    """A layer's tensors by Headwater's names, with those quantised that `--weights` holds as integers."""

    def __init__(
        self, tensors: Mapping[str, Stored], layer: Layer, bits: int, at: str = "", convert: Convert = converted
    ) -> None:
        """`at`: the prefix of names in `convert`."""
        self._tensors, self._quantised, self._bits = tensors, layer.quantised(), bits
        self._at, self._convert, self._shapes = at, convert, layer.tensors()

    def __getitem__(self, name: str) -> Stored:
        """Return a tensor, or a list of parts: of experts, or rows that are quantised and rows that are not.

        Raises CheckpointError for weights that cannot be quantised.
        """
        shape = self._quantised.get(name)
        if shape is None:
            return self._tensors[name]

        def stored() -> Tensor:
            return values_of(self._tensors[name])

        rows = shape[0]
        weight = self._convert(self._at + name, lambda: stored()[:rows].flatten(0, -2), self._bits)
        if len(shape) > 2:
            return [*weight.split([shape[1]] * rows)]
        return [weight, stored()[rows:]] if self._shapes[name][0] > rows else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
