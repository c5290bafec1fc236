"""Mamba-2's recurrence, token by token: the plain form that tests compare `fast.py` with.

T tokens, H heads, P channels a head, G groups of heads, N state width.
"""

from __future__ import annotations

import torch


def state_space(
    x_THP: torch.Tensor,
    dt_TH: torch.Tensor,
    a_H: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    skip_H: torch.Tensor,
    state_HNP: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, H, P] and the state after the last token, in the dtype of the arguments (float64 works).

    Transformers are SSMs (Dao and Gu, 2024), equation 2 with A scalar: the state decays by e^(dt a), a < 0, takes up
    dt x along B, and is read along C; what D lets through is added.
    """
    shared = x_THP.shape[1] // b_TGN.shape[1]
    b_THN, c_THN = (t.repeat_interleave(shared, 1) for t in (b_TGN, c_TGN))
    state_HNP = state_HNP.clone()
    out_THP = torch.empty_like(x_THP)
    for t in range(x_THP.shape[0]):
        taken_HP = dt_TH[t].unsqueeze(-1) * x_THP[t]
        state_HNP *= (dt_TH[t] * a_H).exp()[:, None, None]
        state_HNP += b_THN[t].unsqueeze(-1) * taken_HP.unsqueeze(1)
        out_THP[t] = (state_HNP * c_THN[t].unsqueeze(-1)).sum(1) + skip_H.unsqueeze(-1) * x_THP[t]
    return out_THP, state_HNP
