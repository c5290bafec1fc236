"""The selective scan, token by token: the plain form that tests compare `fast.py` with.

T tokens, N states a channel, C channels.
"""

from __future__ import annotations

import torch


def selective_scan(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    rate_NC: torch.Tensor,
    b_TN: torch.Tensor,
    c_TN: torch.Tensor,
    state_NC: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, C] without the skip, and the state after the last token, in the dtype of the arguments.

    Mamba (Gu and Dao, 2023), equations 2 and 4, with A (`rate_NC`, negative) diagonal in each channel, its decay
    discretised exactly and B to first order, as the authors' code does: a channel's states forget over a step `dt`,
    and take in the step times x along B.
    """
    state_NC = state_NC.clone()
    out_TC = torch.empty_like(x_TC)
    for t in range(x_TC.shape[0]):
        state_NC *= (dt_TC[t] * rate_NC).exp()
        state_NC += (dt_TC[t] * x_TC[t]) * b_TN[t].unsqueeze(-1)
        out_TC[t] = (state_NC * c_TN[t].unsqueeze(-1)).sum(0)
    return out_TC, state_NC
