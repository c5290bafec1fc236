"""Kimi Delta Attention in chunks of 64 tokens.

As the gated delta rule (`gdn/fast.py`), whose steps with a state these are; what differs is what tokens of
a chunk see of each other, D[i, j], and a state's decay: they are there for each key channel (Kimi Linear, section 3.2).

    A  = the part of β Σ_K k_i k_j D[i, j] below the diagonal
    E  = (I + A)⁻¹ (β V − (β e^G ∘ K) S)         G: running sums of g, [t, K]
    O  = (e^G ∘ Q) S + P E                       P = Σ_K q_i k_j D[i, j], not above the diagonal
    S' = Diag(e^(G_64)) S + (e^(G_64 − G) ∘ K)ᵀ E

A chunk is padded with β = 0 and g = 0, which leaves S as it is.

n chunks (of any sequences), t = 64 tokens, H heads, K key width, V value width; M = n·H. All float32.
"""

from __future__ import annotations

import torch

from headwater.mixers.activations import inverse_l2
from headwater.mixers.batch import CHUNK
from headwater.mixers.gdn.fast import Chunks, advance_into, decode_step, transition_into
from headwater.mixers.gla.fast import seen

__all__ = ["Chunks", "advance_into", "decode_step", "prepare", "transition_into"]


def prepare(qk_nt2HK: torch.Tensor, v_ntHV: torch.Tensor, g_ntHK: torch.Tensor, beta_ntH: torch.Tensor) -> Chunks:
    """Normalise and scale queries and keys, and do all work on n chunks that needs no state."""
    n, _, _, n_heads, width = qk_nt2HK.shape
    beta_nHt1 = beta_ntH.transpose(1, 2).unsqueeze(-1).contiguous()
    scale_nt2H1 = inverse_l2(qk_nt2HK)
    scale_nt2H1[:, :, 0] *= width**-0.5
    q_nHtK, k_nHtK = (qk_nt2HK * scale_nt2H1).permute(2, 0, 3, 1, 4)
    k_MtK = k_nHtK.reshape(-1, CHUNK, width)
    qk_nH2tK = k_MtK.new_empty(n, n_heads, 2, CHUNK, width)
    qk_nH2tK[:, :, 0] = q_nHtK
    torch.mul(k_nHtK, beta_nHt1, out=qk_nH2tK[:, :, 1])
    qk_M2tK = qk_nH2tK.flatten(0, 1)
    (attend_Mtt, system_Mtt), from_start_MtK, to_end_MtK = seen(qk_M2tK, k_MtK, g_ntHK.transpose(1, 2))
    attend_Mtt.diagonal(dim1=1, dim2=2).copy_((qk_M2tK[:, 0] * k_MtK).sum(-1))
    unit_tt = torch.eye(CHUNK, device=system_Mtt.device)
    value_nHtV = torch.empty_like(v_ntHV.transpose(1, 2), memory_format=torch.contiguous_format)
    torch.mul(v_ntHV.transpose(1, 2), beta_nHt1, out=value_nHtV)
    return Chunks(
        read_MRK=qk_M2tK.mul_(from_start_MtK.unsqueeze(1)).flatten(1, 2),
        value_MtV=value_nHtV.flatten(0, 1),
        inverse_Mtt=torch.linalg.solve_triangular(system_Mtt, unit_tt, upper=False, unitriangular=True),
        attend_Mtt=attend_Mtt,
        decay_MX1=from_start_MtK[:, -1].unsqueeze(-1),
        write_MtK=to_end_MtK.mul_(k_MtK),
    )
