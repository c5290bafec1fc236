"""Kimi Delta Attention, token by token: the plain form that tests compare `fast.py` with.

T tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch


def delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    state_HKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, H, V] and the state after the last token, in the dtype of the arguments (float64 works).

    Kimi Linear (2025), equation 1: the gated delta rule, where each key channel of the state forgets at its own rate.
    q and k come normalised and scaled; g is the logarithm of the decay.
    """
    state_HKV = state_HKV.clone()
    out_THV = torch.empty_like(v_THV)
    for t in range(q_THK.shape[0]):
        k_HK1 = k_THK[t].unsqueeze(-1)
        state_HKV *= g_THK[t].exp().unsqueeze(-1)
        predicted_HV = (state_HKV * k_HK1).sum(1)
        error_HV = (v_THV[t] - predicted_HV) * beta_TH[t].unsqueeze(-1)
        state_HKV += k_HK1 * error_HV.unsqueeze(1)
        out_THV[t] = (state_HKV * q_THK[t].unsqueeze(-1)).sum(1)
    return out_THV, state_HKV
