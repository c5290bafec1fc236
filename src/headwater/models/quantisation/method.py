"""Method of quantisation: the tensors that stand for one weight, and the parts that readers share.

N outputs, K inputs, X groups of inputs in a row, R rows, W words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Protocol

import torch
from torch import Tensor

from headwater.mixers.quantised import Quantised

WORD = 32  # bits
BYTE = 8
NAN = 0x7F  # bits of a float8 NaN, without its sign


class Method(Protocol):
    """Reader of the weights of a checkpoint that one tool has quantised."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Names, after a module's, of which one is there if its weight is quantised."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names, after a module's, of all tensors that may belong to a quantised weight."""

    def read(self, parts: Mapping[str, Tensor], n_out: int, n_in: int) -> Quantised:
        """Return the weight [N, K]. Raises ValueError that names the part that is wrong, with both shapes."""


def unpacked(word_RW: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers in words of int32, uint8 [R, W · 32 / bits], those of the lowest bits first."""
    byte_RB = word_RW.contiguous().view(torch.uint8)
    if bits == BYTE:
        return byte_RB
    mask = 2**bits - 1
    return torch.stack([(byte_RB >> shift) & mask for shift in range(0, BYTE, bits)], -1).flatten(-2)


def bits_of(words: int, integers: int, name: str) -> int:
    """Return the bits of an integer, of which `words` words hold `integers`. Raises ValueError unless 2, 4 or 8."""
    bits = WORD * words / integers
    if bits not in (2, 4, 8):
        raise ValueError(f"{name} has {words} words for {integers} integers, which is {bits:g} bits, not 2, 4 or 8")
    return int(bits)


def check_shape(name: str, tensor: Tensor, *wanted: int) -> Tensor:
    """Return the tensor. Raises ValueError, with both shapes, for another shape than the one wanted."""
    if tuple(tensor.shape) != wanted:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, must be {list(wanted)}")
    return tensor


def check_order(index_K: Tensor | None, groups: int) -> None:
    """Raise ValueError if the group of each input, `g_idx`, is not that of successive inputs."""
    if index_K is None or groups == 1:
        return
    successive_K = torch.arange(len(index_K)) // (len(index_K) // groups)
    if not torch.equal(index_K.to(torch.int64), successive_K):
        raise ValueError("g_idx gives groups of inputs that do not follow each other (act order), which are not read")


def scale_by_row(scale: Tensor, n_out: int, n_in: int, block: tuple[int, int] | None, name: str) -> Tensor:
    """Return scales [N, X] from one for all, one an output, one a group of inputs, or one a block of both.

    A last block that is smaller makes groups smaller: 576 inputs in blocks of 128 are groups of 64.
    """
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(n_out, 1).contiguous()
    scale = scale.reshape(len(scale), -1)
    if block is None:
        return check_shape(name, scale, n_out, scale.shape[1])
    rows, columns = block
    check_shape(name, scale, -(-n_out // rows), -(-n_in // columns))
    group = gcd(columns, n_in)
    of_row_N = torch.arange(n_out) // rows
    of_group_X = torch.arange(n_in // group) * group // columns
    return scale[of_row_N][:, of_group_X]


def float8(code_NK: Tensor, scale_NX: Tensor) -> Quantised:
    """Return a weight whose codes are float8 numbers (e4m3) as they are. Raises ValueError if one is NaN."""
    n_nan = int((code_NK.view(torch.uint8) & NAN == NAN).sum())
    if n_nan:
        raise ValueError(f"weight has {n_nan:,} numbers that are NaN, of {code_NK.numel():,}")
    return Quantised(code_NK, BYTE, scale_NX, zeros(len(code_NK), 0))


def zeros(n_out: int, zero: int) -> Tensor:
    """Return one zero for all groups of an output, [N, 1]."""
    return torch.full((n_out, 1), zero, dtype=torch.uint8)
