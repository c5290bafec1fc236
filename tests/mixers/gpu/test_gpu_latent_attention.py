"""Decode among latents, in Triton's interpreter: held to plain attention, and to its own bits."""

from __future__ import annotations

import pytest
import torch

from headwater.mixers.gpu import attention as paged_attention
from headwater.mixers.gpu import mla as gpu
from headwater.mixers.gpu.attention import PagedStep
from tests.mixers.gpu.test_gpu_attention import PAGE, PAGES, batch_of, random


@pytest.mark.parametrize(("heads", "latent", "place"), [(4, 32, 8), (19, 24, 20), (1, 16, 0)])
def test_decode_over_latents_equals_plain_attention_among_any_sequences(
    heads: int, latent: int, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "SPLIT", 128)
    lengths, width, scale = [1, 64, 300, 129], latent + place, 0.2
    rows = [random(n, width, seed=n) for n in lengths]
    q_BHX = random(4, heads, width)
    free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0))
    pages = torch.full((PAGES, 2, PAGE * width), float("nan"))[:, 0]
    tables = []
    for row_LX in rows:
        n = -(-len(row_LX) // PAGE)
        tables.append(free[:n])
        free = free[n:]
        whole = torch.full((n * PAGE, width), float("nan"))
        whole[: len(row_LX)] = row_LX
        pages[tables[-1]] = whole.view(n, -1)
    together = gpu.decode(q_BHX, pages, PagedStep.of(batch_of([], tables, lengths), PAGE), PAGE, scale, latent)
    for i, row_LX in enumerate(rows):
        score_HL = q_BHX[i].double() @ row_LX.double().T * scale
        wanted = score_HL.softmax(-1) @ row_LX[:, :latent].double()
        assert (together[i].double() - wanted).abs().max() < 1e-5
        step = PagedStep.of(batch_of([], tables[i : i + 1], lengths[i : i + 1]), PAGE)
        assert torch.equal(gpu.decode(q_BHX[i : i + 1], pages, step, PAGE, scale, latent)[0], together[i])
