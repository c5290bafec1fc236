"""What tokens of a chunk see of each other where every key channel decays at its own rate.

With g the logarithm of the decays, token i sees token j through e^(g_{j+1} + … + g_i), channel by channel. That is a
factor of i times a factor of j for any point between them, but if a point serves pairs that it does not lie between,
one of the two overflows. So pairs are parted by halves: where a stretch of tokens is cut in the middle, every token of
its second half sees every one of its first through the cut, which makes one product of matrices. Stretches of
2, 4, …, 64 tokens have all pairs. Sums of g are only ever added to, never subtracted from each other: none is above 0,
and a strong decay leaves no error in the weak ones after it.

M chunks times heads, X kinds of rows (queries, keys), t = 64 tokens, h tokens of a half, m = M · cuts, K key width.
All float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headwater.mixers.chunks import CHUNK
from headwater.mixers.powers import LOG2_E, empty_vectors, exp2_


class Seen(NamedTuple):
    """Σ_K x_i k_j e^(g_{j+1} + … + g_i) for j < i, zeros elsewhere; and decays from and to the ends of chunks."""

    pairs_XMtt: torch.Tensor  # those of each kind are contiguous
    from_start_MtK: torch.Tensor  # e^(g_1 + … + g_i)
    to_end_MtK: torch.Tensor  # e^(g_{i+1} + … + g_64)


def seen(x_MXtK: torch.Tensor, k_MtK: torch.Tensor, g_nHtK: torch.Tensor) -> Seen:
    """M = n · H; `g_nHtK` may be strided."""
    n, kinds, _, width = x_MXtK.shape
    pairs_XMtt = x_MXtK.new_zeros(kinds, n, CHUNK, CHUNK)
    sums_2MtK, sum_vectors = empty_vectors(2, n, CHUNK, width, device=x_MXtK.device)
    factor_2mhK, factor_vectors = empty_vectors(2, n, CHUNK // 2, width, device=x_MXtK.device)
    left_mXhK, right_mhK = (
        torch.empty_like(t[..., : CHUNK // 2, :], memory_format=torch.contiguous_format) for t in (x_MXtK, k_MtK)
    )
    after_MtK, before_MtK = sums_2MtK  # of g within the half: after a token, and up to it
    after_MtK.zero_()
    torch.mul(g_nHtK, LOG2_E, out=before_MtK.view(g_nHtK.shape))
    half = 1
    while half < CHUNK:
        cuts = (n, CHUNK // (2 * half))
        sums = sums_2MtK.view(2, *cuts, 2, half, width)
        factor = factor_2mhK.view(2, *cuts, half, width)
        factor.copy_(sums.diagonal(dim1=0, dim2=3).movedim(-1, 0))  # of first halves to the cut, of second ones from it
        exp2_(factor_vectors)
        left, right = left_mXhK.view(*cuts, kinds, half, width), right_mhK.view(*cuts, half, width)
        torch.mul(k_MtK.view(*cuts, 2, half, width)[:, :, 0], factor[0], out=right)
        x = x_MXtK.view(n, kinds, cuts[1], 2, half, width)
        torch.mul(x[:, :, :, 1].transpose(1, 2), factor[1].unsqueeze(2), out=left)
        dots_mRh = _dots(left.view(-1, kinds * half, width), right.view(-1, half, width))
        _across(pairs_XMtt, half).copy_(dots_mRh.view(*cuts, kinds, half, half))
        after, before = sums
        after[:, :, 0] += before[:, :, 1, -1:]
        before[:, :, 1] += before[:, :, 0, -1:]
        half *= 2
    exp2_(sum_vectors)
    return Seen(pairs_XMtt, before_MtK, after_MtK)


def _dots(left_mRK: torch.Tensor, right_mhK: torch.Tensor) -> torch.Tensor:
    """Left times right, [m, R, h]; a batched product of one column would be another kernel."""
    if right_mhK.shape[1] == 1:
        return (left_mRK * right_mhK).sum(-1, keepdim=True)
    return torch.bmm(left_mRK, right_mhK.mT)


def _across(pairs_XMtt: torch.Tensor, half: int) -> torch.Tensor:
    """Of all cuts between halves of that length, the pairs across: a view [M, cuts, X, h, h]."""
    kinds, n = pairs_XMtt.shape[:2]
    n_cuts = CHUNK // (2 * half)
    across = pairs_XMtt.view(kinds, n, n_cuts, 2, half, n_cuts, 2, half)[:, :, :, 1, :, :, 0]
    return across.diagonal(dim1=2, dim2=4).permute(1, 4, 0, 2, 3)
