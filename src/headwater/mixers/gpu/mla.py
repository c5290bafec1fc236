"""Decode over latents on a GPU, in Triton: the queries of several heads over one row a token, which is read once.

Keys are rows of the arena, values are their latents. Blocks and splits stand at absolute positions, as those of
`gpu/attention.py`, which also merges splits: a query's bits depend only on its own sequence.

B decoding sequences, H heads, L latent, E position channels, X = L + E, T pages of a table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.mixers.attention import AttentionStep
from headwater.mixers.gpu import attention, dense
from headwater.mixers.gpu.attention import Decoding, paged
from headwater.mixers.mla import ExpandedHeads, LatentAttentionMixer
from headwater.mixers.softmax import CausalMask

HEADS = 16  # of a program
TILE = 32  # tokens of a block: 32 KB of a row with 512 channels in bfloat16; pages are multiples of it


@triton.jit(do_not_specialize=["table_row", "splits"])
def _decode_split(
    q, pages, best_sum, reads, table_BT, length_B, scale, table_row, n_heads, page_size, page_row, splits,
    latent: tl.constexpr, padded: tl.constexpr, place: tl.constexpr, place_padded: tl.constexpr,
    heads: tl.constexpr, tile: tl.constexpr, split: tl.constexpr,
):  # fmt: skip
    """Attend from some heads of a sequence to one split of its rows; write maximum, sum and the weighted values."""
    which, part = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    channel, at_place = tl.arange(0, padded), tl.arange(0, place_padded)
    in_latent, in_place = (channel < latent)[None, :], (at_place < place)[None, :]
    in_heads = (head < n_heads)[:, None]
    width = latent + place
    at_head = q + (which * n_heads + head[:, None]) * width
    q_HL = tl.load(at_head + channel[None, :], mask=in_heads & in_latent, other=0.0)
    q_HE = tl.load(at_head + latent + at_place[None, :], mask=in_heads & in_place, other=0.0)
    length = tl.load(length_B + which)
    best = tl.full((heads,), -1e30, tl.float32)
    total = tl.zeros((heads,), tl.float32)
    read = tl.zeros((heads, padded), tl.float32)
    first = part * (split // tile)
    for block in range(first, tl.minimum(first + split // tile, (length + tile - 1) // tile)):
        key = block * tile + tl.arange(0, tile)
        written = (key < length)[:, None]  # memory of a page after the last token may hold anything
        page = tl.load(table_BT + which * table_row + block * tile // page_size).to(tl.int64)
        token = block * tile % page_size + tl.arange(0, tile)
        at_row = pages + page * page_row + token[:, None] * width
        row_tL = tl.load(at_row + channel[None, :], mask=written & in_latent, other=0.0)
        row_tE = tl.load(at_row + latent + at_place[None, :], mask=written & in_place, other=0.0)
        score = tl.dot(q_HL, tl.trans(row_tL), input_precision="ieee")
        score = (score + tl.dot(q_HE, tl.trans(row_tE), input_precision="ieee")) * scale
        visible = (key < length)[None, :] & (head >= 0)[:, None]
        score = tl.where(visible, score, float("-inf"))
        better = tl.maximum(best, tl.max(score, 1))
        weight = tl.where(visible, tl.exp(score - better[:, None]), 0.0)
        kept = tl.exp(best - better)
        total = total * kept + tl.sum(weight, 1)
        read = read * kept[:, None] + tl.dot(weight.to(row_tL.dtype), row_tL, input_precision="ieee")
        best = better
    to = (which * n_heads + head) * splits + part
    has_keys = (head < n_heads) & (first * tile + 0 * head < length)
    tl.store(best_sum + 2 * to, best, mask=has_keys)
    tl.store(best_sum + 2 * to + 1, total, mask=has_keys)
    tl.store(reads + to[:, None] * latent + channel[None, :], read, mask=has_keys[:, None] & in_latent)


def decode(q_BHX: Tensor, pages: Tensor, step: Decoding, page_size: int, scale: float, latent: int) -> Tensor:
    """Return the latents that one query of each sequence reads, [B, H, L]; `pages` are [pages, page_size · X]."""
    n, n_heads, width = q_BHX.shape
    q_BHX = dense(q_BHX)
    out_BHL = q_BHX.new_empty(n, n_heads, latent)
    best_sum = torch.empty(n, n_heads, step.splits, 2, dtype=torch.float32, device=q_BHX.device)
    reads = torch.empty(n, n_heads, step.splits, latent, dtype=torch.float32, device=q_BHX.device)
    padded, place = max(16, triton.next_power_of_2(latent)), width - latent
    _decode_split[n, triton.cdiv(n_heads, HEADS), step.splits](
        q_BHX, pages, best_sum, reads, step.table_BT, step.length_B, scale, step.table_BT.stride(0), n_heads, page_size,
        pages.stride(0), step.splits, latent=latent, padded=padded, place=place,
        place_padded=max(16, triton.next_power_of_2(place)), heads=HEADS, tile=TILE, split=attention.SPLIT,
    )  # fmt: skip
    attention.merge_into(out_BHL, best_sum, reads, step)
    return out_BHL


class ExpandedHeadsOnGpu(ExpandedHeads):
    """Expanded heads whose attention runs in Triton."""

    def _attended(self, q_TG1M: Tensor, keys_values: tuple[Tensor, Tensor], start: int, mask: CausalMask) -> Tensor:
        return attention.prefill_alone(q_TG1M, keys_values, start, self.shape.score_scale)


class LatentAttentionOnGpu(LatentAttentionMixer):
    """Latent attention in Triton: over expanded heads in prefill, over latents in decode."""

    expands = ExpandedHeadsOnGpu

    def _read(self, q_BHX: Tensor, step: AttentionStep) -> Tensor:
        (pages,) = step.arena.pages_of(self.layer)
        scale = self.shape.score_scale
        return decode(q_BHX, pages, paged(step), step.arena.page_size, scale, self.shape.latent)
