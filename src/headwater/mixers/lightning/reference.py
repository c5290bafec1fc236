"""Linear attention with fixed decays, token by token: the plain form that tests compare `fast.py` with.

T tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch


def fixed_decay(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    slope_H: torch.Tensor,
    state_HKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, H, V] and the state after the last token, in the dtype of the arguments (float64 works).

    Lightning Attention-2 (Qin et al. 2024), equation 4, with λ = e^−slope: the state forgets, and k vᵀ is added.
    Queries come scaled.
    """
    state_HKV = state_HKV.clone()
    out_THV = torch.empty_like(v_THV)
    decay_H11 = slope_H.neg().exp()[:, None, None]
    for t in range(q_THK.shape[0]):
        state_HKV *= decay_H11
        state_HKV += k_THK[t].unsqueeze(-1) * v_THV[t].unsqueeze(1)
        out_THV[t] = (state_HKV * q_THK[t].unsqueeze(-1)).sum(1)
    return out_THV, state_HKV
