"""Causal attention of some queries over a sequence's keys, in bits that depend on the sequence alone.

What a query of a prefill sees is fixed by its position: the keys of all 512-token blocks up to its own, those after it
masked. How many rows are computed together has no influence as long as their number is a multiple of 8 (fewer than 4
rows go another way through the product inside scaled_dot_product_attention; found by measurement, see docs/decisions).

Shapes: T queries, R rows (T rounded up to 8), B decoding sequences, G KV heads, Q queries that share one KV head, K
keys, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headwater.mixers.attention.step import AttentionStep
from headwater.spec import KEY_BLOCK

ROWS = 8


def prefill_into(
    out_TGQD: torch.Tensor,
    q_TGQD: torch.Tensor,
    keys_values: tuple[torch.Tensor, torch.Tensor],
    start: int,
    step: AttentionStep,
    scale: float | None = None,
) -> None:
    """Attention of the queries at positions [start, start + T) over keys [0, start + T), which were just gathered."""
    first, end = start, start + q_TGQD.shape[0]
    while first < end:
        n_keys = (first // KEY_BLOCK + 1) * KEY_BLOCK
        last = min(n_keys, end)
        rows = slice(first - start, last - start)
        keys, values = (x[:n_keys] for x in keys_values)
        out_TGQD[rows] = backwards(q_TGQD[rows], (keys, values), step.ramp[step.visible - last :], scale)
        first = last


def backwards(
    q_TGQD: torch.Tensor,
    keys_values: tuple[torch.Tensor, torch.Tensor],
    mask_from_last: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Attention of successive queries over keys [K, G, D].

    They run backwards, the last one in row 0: then row r may see one key less than row r - 1, and the mask is one
    vector, of which row 0 sees the beginning and each row after it starts one further on. It needs no memory that grows
    with queries times keys.
    """
    n_queries, n_kv, n_shared, width = q_TGQD.shape
    n_rows = -(-n_queries // ROWS) * ROWS
    q_RGQD = q_TGQD.new_zeros(n_rows, n_kv, n_shared, width)
    q_RGQD[:n_queries] = q_TGQD.flip(0)
    k_GQKD, v_GQKD = (x.transpose(0, 1)[:, None].expand(-1, n_shared, -1, -1) for x in keys_values)
    mask_RK = mask_from_last.as_strided((n_rows, len(keys_values[0])), (1, 1))
    out_GQRD = attend(q_RGQD.permute(1, 2, 0, 3), k_GQKD, v_GQKD, mask_RK, scale)
    return out_GQRD[:, :, :n_queries].permute(2, 0, 1, 3).flip(0)


def decode(
    q_BGQD: torch.Tensor,
    keys_values: tuple[torch.Tensor, torch.Tensor],
    mask_B11K: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of one query of each sequence over its keys [B, K, G, D].

    Queries that share a KV head are rows of one product, or of two if there is one KV head: each thread has its own.
    """
    halves = 2 if q_BGQD.shape[1] == 1 and q_BGQD.shape[2] % 2 == 0 else 1
    q_BHRD = q_BGQD.unflatten(2, (halves, -1)).flatten(1, 2)
    n_heads, n_rows = q_BHRD.shape[1:3]
    k_BHKD, v_BHKD = (x.transpose(1, 2).expand(-1, n_heads, -1, -1) for x in keys_values)
    mask_B1RK = mask_B11K.expand(-1, -1, n_rows, -1)
    return attend(q_BHRD, k_BHKD, v_BHKD, mask_B1RK, scale).reshape(q_BGQD.shape)


def attend(
    q_BHRD: torch.Tensor, k_BHKD: torch.Tensor, v_BHKD: torch.Tensor, mask: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """At least two heads at once: the products of a single one are spread over threads, and have other bits then."""
    alone = q_BHRD.shape[0] * q_BHRD.shape[1] == 1
    q, k, v = (x.expand(2, -1, -1, -1) if alone else x for x in (q_BHRD, k_BHKD, v_BHKD))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[: len(q_BHRD)]
