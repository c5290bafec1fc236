"""The gated delta rule, token by token: the plain form that tests compare `fast.py` with.

T tokens, H value heads (query and key heads are repeated to as many), K key width, V value width.
"""

from __future__ import annotations

import torch


def delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    state_HKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, H, V] and the state after the last token, in the dtype of the arguments (float64 works).

    Gated Delta Networks (Yang, Kautz and Hatamizadeh, 2024), equation 10, with g the logarithm of its decay α:
    the state forgets, predicts v from k, and is corrected by β times the error. q and k come normalised and scaled.
    """
    state_HKV = state_HKV.clone()
    out_THV = torch.empty_like(v_THV)
    for t in range(q_THK.shape[0]):
        k_HK1 = k_THK[t].unsqueeze(-1)
        state_HKV *= g_TH[t].exp()[:, None, None]
        predicted_HV = (state_HKV * k_HK1).sum(1)
        error_HV = (v_THV[t] - predicted_HV) * beta_TH[t].unsqueeze(-1)
        state_HKV += k_HK1 * error_HV.unsqueeze(1)
        out_THV[t] = (state_HKV * q_THK[t].unsqueeze(-1)).sum(1)
    return out_THV, state_HKV


def causal_convolution(x_TC: torch.Tensor, weight_WC: torch.Tensor, tail_CW: torch.Tensor) -> torch.Tensor:
    """Return each channel's weighted sum of its last W inputs; inputs before the first token are in `tail_CW`."""
    width = weight_WC.shape[0]
    x_TC = torch.cat((tail_CW.T.to(x_TC.dtype), x_TC))
    return torch.stack([(x_TC[t : t + width] * weight_WC).sum(0) for t in range(x_TC.shape[0] - width + 1)])
