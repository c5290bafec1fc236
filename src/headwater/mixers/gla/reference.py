"""Gated linear attention, token by token: the plain form that tests compare `fast.py` with.

T tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch


def decayed_by_channel(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    state_HKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, H, V] and the state after the last token, in the dtype of the arguments (float64 works).

    Gated Linear Attention (Yang et al. 2023), equation 3, with g the logarithm of its decay α: each key channel of the
    state forgets at its own rate, and k vᵀ is added. Queries come scaled.
    """
    state_HKV = state_HKV.clone()
    out_THV = torch.empty_like(v_THV)
    for t in range(q_THK.shape[0]):
        state_HKV *= g_THK[t].exp().unsqueeze(-1)
        state_HKV += k_THK[t].unsqueeze(-1) * v_THV[t].unsqueeze(1)
        out_THV[t] = (state_HKV * q_THK[t].unsqueeze(-1)).sum(1)
    return out_THV, state_HKV
