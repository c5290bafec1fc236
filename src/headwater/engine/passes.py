"""Passes over rows of the vocabulary, by torch or by kernels, which give the same to the bit.

R rows, V tokens of the vocabulary, K tokens that a pass leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headwater import kernels

HEAP = 64  # torch.topk keeps k entries in a heap if there are 64 k of them or more


class Passes:
    """The reference, in torch."""

    def largest(self, x_RV: Tensor) -> tuple[list[float], list[int]]:
        """Return each row's largest element, NaN if any is NaN, and the first token that has it."""
        return x_RV.amax(dim=-1).tolist(), x_RV.argmax(dim=-1).tolist()

    def scaled(self, x_RV: Tensor, largest_R: Sequence[float], divisor_R: Sequence[float]) -> Tensor:
        """Return (x - largest) / divisor."""
        return torch.stack([(x_V - m) / d for x_V, m, d in zip(x_RV, largest_R, divisor_R, strict=True)])

    def leading(self, x_V: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest elements and their tokens, in the order of `torch.topk`."""
        return x_V.topk(k)

    def descending(self, probs_RV: Tensor, least_R: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
        """Return each row's elements that are at least its `least`, and their tokens: equal ones in their order."""
        return [_sorted(probs_V, least) for probs_V, least in zip(probs_RV, least_R, strict=True)]

    def drawn(self, probs_RK: Tensor, least_R: Sequence[float], uniform_R: Sequence[float]) -> list[int]:
        """Return an index of each row by inverse transform, never one of probability 0 or less than the row's `least`.

        It is the first index whose cumulative sum is more than `uniform` in [0, 1) times the row's sum: in float64,
        rounding cannot lift that product to the sum itself.
        """
        return [_drawn(*row) for row in zip(probs_RK, least_R, uniform_R, strict=True)]

    def n_larger(self, x_RV: Tensor, bound_R: Tensor) -> list[int]:
        """Return how many elements of each row are larger than its bound."""
        counts: list[int] = (x_RV > bound_R[:, None]).sum(dim=-1).tolist()
        return counts


def _sorted(probs_V: Tensor, least: float) -> tuple[Tensor, Tensor]:
    token_K = (probs_V >= least).nonzero()[:, 0]
    probs_K, order_K = probs_V[token_K].sort(descending=True, stable=True)
    return probs_K, token_K[order_K]


def _drawn(probs_K: Tensor, least: float, uniform: float) -> int:
    cumulative_K = torch.where(probs_K >= least, probs_K, 0.0).cumsum(0, dtype=torch.float64)
    return int(torch.searchsorted(cumulative_K, uniform * cumulative_K[-1:], right=True))


class KernelPasses(Passes):
    """By kernels; rows are float32, elements of a row side by side."""

    def __init__(self, sampling: ModuleType) -> None:
        self._kernels = sampling

    def largest(self, x_RV: Tensor) -> tuple[list[float], list[int]]:
        largest_R, first_R = np.empty(len(x_RV), np.float32), np.empty(len(x_RV), np.int64)
        self._kernels.largest_into(largest_R, first_R, *_rows(x_RV))
        return largest_R.tolist(), first_R.tolist()

    def scaled(self, x_RV: Tensor, largest_R: Sequence[float], divisor_R: Sequence[float]) -> Tensor:
        out_RV = torch.empty(x_RV.shape)
        numbers = (np.array(numbers_R, np.float32) for numbers_R in (largest_R, divisor_R))
        self._kernels.scaled_into(out_RV.view(-1).numpy(), *_rows(x_RV), *numbers)
        return out_RV

    def leading(self, x_V: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Leave out entries that k earlier ones are as large as: torch's heap does not take them either."""
        if HEAP * k > len(x_V):
            return super().leading(x_V, k)
        token_N, count_1 = np.empty(len(x_V), np.int64), np.array([k])
        token_N[:k] = np.arange(k)
        self._kernels.leading_into(token_N, count_1, *_rows(x_V[None]), x_V[:k].sort().values.numpy(), k)
        tokens = torch.from_numpy(token_N[: count_1[0]])
        entries = F.pad(x_V[tokens], (0, max(0, HEAP * k - len(tokens))), value=-torch.inf)  # or torch sorts them
        value_K, at_K = entries.topk(k)
        return value_K, tokens[at_K]

    def descending(self, probs_RV: Tensor, least_R: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
        rows, size = probs_RV.shape
        bits_R2V, token_R2V = np.empty((rows, 2, size), np.uint32), np.empty((rows, 2, size), np.int32)
        count_R, least = np.empty(rows, np.int64), np.array(least_R, np.float32).view(np.uint32)
        x, *shape = _rows(probs_RV)
        self._kernels.descending_into(bits_R2V.ravel(), token_R2V.ravel(), count_R, x.view(np.uint32), *shape, least)
        return [
            (torch.from_numpy(bits_V[:n].view(np.float32)), torch.from_numpy(token_V[:n]).long())
            for bits_V, token_V, n in zip(bits_R2V[:, 1], token_R2V[:, 1], count_R, strict=True)
        ]

    def drawn(self, probs_RK: Tensor, least_R: Sequence[float], uniform_R: Sequence[float]) -> list[int]:
        token_R = np.empty(len(probs_RK), np.int64)
        numbers = np.array(least_R, np.float32), np.array(uniform_R, np.float64)
        self._kernels.draw_into(token_R, *_rows(probs_RK), *numbers)
        tokens: list[int] = token_R.tolist()
        return tokens

    def n_larger(self, x_RV: Tensor, bound_R: Tensor) -> list[int]:
        count_R = np.empty(len(x_RV), np.int64)
        self._kernels.count_above_into(count_R, *_rows(x_RV), bound_R.contiguous().numpy())
        counts: list[int] = count_R.tolist()
        return counts


def _rows(x_RV: Tensor) -> tuple[np.ndarray[tuple[int], np.dtype[np.float32]], int, int, int]:
    """Return rows as kernels take them: flat, with the elements from one to the next, their number and their size."""
    from headwater.kernels.recording import flat

    return flat(x_RV), x_RV.stride(0), *x_RV.shape


def passes() -> Passes:
    """Return the passes of this process: by kernels if there are any."""
    if not kernels.available():
        return Passes()
    from headwater.kernels import sampling

    return KernelPasses(sampling)


def broken_passes(vocab_size: int) -> Iterator[str]:
    """Name passes whose results are not those of torch, for three rows of a vocabulary."""
    generator = torch.Generator().manual_seed(0)
    x_RV = torch.randn(3, vocab_size, generator=generator).bfloat16().float()  # some are equal
    probs_RV, bound_R, no_R = torch.softmax(x_RV, dim=-1), x_RV[:, 0], [0.0] * 3
    uniform_R = torch.rand(3, dtype=torch.float64, generator=generator).tolist()
    results: dict[str, Callable[[Passes], Any]] = {
        "largest logits": lambda by: by.largest(x_RV),
        "scaled logits": lambda by: by.scaled(x_RV, no_R, uniform_R).tolist(),
        "most likely tokens": lambda by: [part.tolist() for part in by.leading(x_RV[0], min(20, vocab_size))],
        "sorted tokens": lambda by: [part.tolist() for row in by.descending(probs_RV, no_R) for part in row],
        "tokens drawn": lambda by: by.drawn(probs_RV, no_R, uniform_R),
        "ranks": lambda by: by.n_larger(x_RV, bound_R),
    }
    for name, result in results.items():
        if result(passes()) != result(Passes()):
            yield f"{name} from a vocabulary of {vocab_size} by a kernel"
