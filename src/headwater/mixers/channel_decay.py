"""What tokens of a chunk see of each other where every key channel decays at its own rate.

With g the logarithm of the decays, token i sees token j through e^(g_{j+1} + … + g_i), channel by channel. That is a
factor of i times a factor of j for any point between them, but if a point serves pairs that it does not lie between,
one of the two overflows. So pairs are parted by halves: where a stretch of tokens is cut in the middle, every token of
its second half sees every one of its first through the cut, which makes one product of matrices. Stretches of
2, 4, …, 64 tokens have all pairs. Sums of g are only ever added to, never subtracted from each other: none is above 0,
and a strong decay leaves no error in the weak ones after it.

M chunks times heads, X kinds of rows (queries, keys), t = 64 tokens, K key width. All float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headwater.mixers.chunks import CHUNK


class Seen(NamedTuple):
    """Σ_K x_i k_j e^(g_{j+1} + … + g_i) for j < i, zeros elsewhere; and the decays of whole chunks."""

    pairs_XMtt: torch.Tensor  # those of each kind are contiguous
    from_start_MtK: torch.Tensor  # e^(g_1 + … + g_i)
    to_end_MtK: torch.Tensor  # e^(g_{i+1} + … + g_64)


def seen(x_MXtK: torch.Tensor, k_MtK: torch.Tensor, g_MtK: torch.Tensor) -> Seen:
    """`g_MtK` is written over."""
    n, kinds, _, width = x_MXtK.shape
    pairs_XMtt = x_MXtK.new_zeros(kinds, n, CHUNK, CHUNK)
    before_MtK, after_MtK = g_MtK, torch.zeros_like(g_MtK)  # sums within the half: up to a token, and after it
    half = 1
    while half < CHUNK:
        n_cuts = CHUNK // (2 * half)
        halves = (n, n_cuts, 2, half, width)
        before, after = before_MtK.view(halves), after_MtK.view(halves)
        right_mhK = (after[:, :, 0].exp() * k_MtK.view(halves)[:, :, 0]).view(-1, half, width)
        left_MmXhK = x_MXtK.view(n, kinds, *halves[1:])[:, :, :, 1].transpose(1, 2) * before[:, :, None, 1].exp()
        _of_cuts(pairs_XMtt, half).copy_(
            _dots(left_MmXhK.reshape(-1, kinds * half, width), right_mhK).view(n, n_cuts, kinds, half, half)
        )
        total = before[:, :, 1, -1:].clone()
        before[:, :, 1] += before[:, :, 0, -1:]
        after[:, :, 0] += total
        half *= 2
    return Seen(pairs_XMtt, before_MtK.exp_(), after_MtK.exp_())


def _dots(left_mRK: torch.Tensor, right_mhK: torch.Tensor) -> torch.Tensor:
    """Left times right, [m, R, h]; a batched product of one column would be another kernel."""
    if right_mhK.shape[1] == 1:
        return (left_mRK * right_mhK).sum(-1, keepdim=True)
    return torch.bmm(left_mRK, right_mhK.mT)


def _of_cuts(pairs_XMtt: torch.Tensor, half: int) -> torch.Tensor:
    """Of all cuts between halves of that length, the pairs across: a view [M, cuts, X, h, h]."""
    kinds, n = pairs_XMtt.shape[:2]
    n_cuts = CHUNK // (2 * half)
    across = pairs_XMtt.view(kinds, n, n_cuts, 2, half, n_cuts, 2, half)[:, :, :, 1, :, :, 0]
    return across.diagonal(dim1=2, dim2=4).permute(1, 4, 0, 2, 3)
