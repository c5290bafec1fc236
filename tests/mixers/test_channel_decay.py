"""Products of rows and keys with a decay for each channel, compared with the sum over each pair in float64.

M chunks times heads, X kinds of rows, t = 64 tokens, K key width.
"""

import pytest
import torch

from headwater.mixers.kda import seen
from headwater.mixers.slices import CHUNK

HEADS, KINDS, WIDTH = 5, 2, 24
FLUSHED = torch.finfo(torch.float32).tiny  # smaller numbers are zero, here as in the server


def inputs(decays: str = "ordinary") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [M, X, t, K], keys [M, t, K] and log decays of that kind [M, t, K]."""
    generator = torch.Generator().manual_seed(0)
    x_MXtK = torch.randn(HEADS, KINDS, CHUNK, WIDTH, generator=generator)
    k_MtK = torch.randn(HEADS, CHUNK, WIDTH, generator=generator)
    g_MtK = -torch.rand(HEADS, CHUNK, WIDTH, generator=generator)
    if decays == "strong in some tokens":
        g_MtK[:, ::7, ::2] *= 1e30
    elif decays == "strong in some channels":
        g_MtK[..., ::3] *= 1e4
    elif decays == "infinite in some tokens":
        g_MtK[:, 5::11] = float("-inf")
    else:
        g_MtK *= {"ordinary": 1.0, "none": 0.0, "weak": 1e-7, "strong": 1e3, "stronger than any sum": 3e38}[decays]
    return x_MXtK, k_MtK, g_MtK


def by_pairs(
    x_MXtK: torch.Tensor, k_MtK: torch.Tensor, g_MtK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with one sum of decays for each pair, over only the tokens between them."""
    x_MXtK, k_MtK, g_MtK = x_MXtK.double(), k_MtK.double(), g_MtK.double()
    pairs_XMtt = torch.zeros(KINDS, HEADS, CHUNK, CHUNK, dtype=torch.float64)
    for i in range(1, CHUNK):
        seen_MjK = _sums_to_the_end(g_MtK[:, 1 : i + 1]).exp() * k_MtK[:, :i]
        pairs_XMtt[:, :, i, :i] = torch.einsum("mxk,mjk->xmj", x_MXtK[:, :, i], seen_MjK)
    after_MtK = torch.cat((g_MtK[:, 1:], torch.zeros(HEADS, 1, WIDTH)), 1)
    return pairs_XMtt, g_MtK.cumsum(1).exp(), _sums_to_the_end(after_MtK).exp()


def _sums_to_the_end(g_MtK: torch.Tensor) -> torch.Tensor:
    return g_MtK.flip(1).cumsum(1).flip(1)


@pytest.mark.parametrize(
    "decays",
    [
        "ordinary",
        "none",
        "weak",
        "strong",
        "stronger than any sum",
        "strong in some tokens",
        "strong in some channels",
        "infinite in some tokens",
    ],
)
def test_all_pairs_equal_float64_for_any_decays(decays: str) -> None:
    given = inputs(decays)
    with torch.inference_mode():
        got = seen(given[0], given[1], given[2])
    for fast, wanted in zip(got, by_pairs(*given), strict=True):
        assert fast.isfinite().all()
        assert (fast - wanted).abs().max() <= max(2e-6 * wanted.abs().max(), FLUSHED)


def test_a_strong_decay_leaves_no_error_in_weak_ones_after_it() -> None:
    """Differences of running sums would: they are lost in a sum that is far larger."""
    x_MXtK, k_MtK, g_MtK = inputs()
    struck_MtK = g_MtK.clone()
    struck_MtK[:, 20] = -1e30
    calm, struck = seen(x_MXtK, k_MtK, g_MtK), seen(x_MXtK, k_MtK, struck_MtK)
    assert torch.equal(struck.pairs_XMtt[..., 21:, 20:], calm.pairs_XMtt[..., 21:, 20:])
    assert torch.equal(struck.pairs_XMtt[..., :20, :20], calm.pairs_XMtt[..., :20, :20])
    assert (struck.pairs_XMtt[..., 20:, :20] == 0).all()


@pytest.mark.parametrize("width", [1, 7, 24, 128])
def test_head_has_the_same_bits_by_itself_and_among_others(width: int) -> None:
    given = [t[..., :width] if width <= WIDTH else t.repeat_interleave(6, -1)[..., :width] for t in inputs()]
    together = seen(*(t.contiguous() for t in given))
    for head in range(HEADS):
        alone = seen(*(t[head : head + 1].contiguous() for t in given))
        assert torch.equal(alone.pairs_XMtt[:, 0], together.pairs_XMtt[:, head])
        assert torch.equal(alone.from_start_MtK[0], together.from_start_MtK[head])
        assert torch.equal(alone.to_end_MtK[0], together.to_end_MtK[head])
