"""Lightning attention. L tokens, D model width, H heads, K width of keys and values."""

import torch

from headwater.layers.attention import Rotary
from headwater.layers.lightning import Lightning, alibi_slopes
from headwater.mixers.lightning import fixed_decay
from tests.contract.recurrences.case import WIDTH, Recurrence, Tensors


def reference(layer: Lightning, w: Tensors, x_LD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q_LHK, k_LHK, v_LHK = _heads(layer, x_LD @ w["qkv_proj.weight"].T + w.get("qkv_proj.bias", 0.0))
    if layer.normed:
        q_LHK, k_LHK = (_rms(t, layer) * w[f"{n}_norm.weight"] for n, t in zip("qk", (q_LHK, k_LHK), strict=True))
    if layer.rotary is not None:
        q_LHK, k_LHK = (rotated(t, layer.rotary) for t in (q_LHK, k_LHK))
    slope_H = torch.tensor(layer.slopes, dtype=x_LD.dtype)
    zero_HKK = x_LD.new_zeros(layer.heads, layer.head_dim, layer.head_dim)
    read_LHK, state_HKK = fixed_decay(q_LHK * layer.scale, k_LHK, v_LHK, slope_H, zero_HKK)
    normed_LW = _rms(read_LHK.flatten(1).unflatten(1, (layer.norm_groups, -1)), layer).flatten(1) * w["g_norm.weight"]
    out_LW = normed_LW * torch.sigmoid(x_LD @ w["g_proj.weight"].T)
    return out_LW @ w["o_proj.weight"].T + w.get("o_proj.bias", 0.0), state_HKK


def _heads(layer: Lightning, qkv_LC: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values, [L, H, K] each."""
    qkv_LC = torch.nn.functional.silu(qkv_LC) if layer.activated else qkv_LC
    if layer.by_head:
        return list(qkv_LC.unflatten(1, (layer.heads, -1)).chunk(3, -1))
    return [part.unflatten(1, (layer.heads, -1)) for part in qkv_LC.chunk(3, -1)]


def _rms(x: torch.Tensor, layer: Lightning) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + layer.norm_eps).sqrt()


def rotated(x_LHK: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Channels i and i + dim/2 as one complex number, turned by position · theta^(−2i/dim)."""
    half = rotary.dim // 2
    speed_F = rotary.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle_L1F = (torch.arange(len(x_LHK), dtype=torch.float64)[:, None] * speed_F).unsqueeze(1)
    turned_LHF = torch.complex(x_LHK[..., :half], x_LHK[..., half : 2 * half]) * torch.polar(
        torch.ones_like(angle_L1F), angle_L1F
    )
    return torch.cat((turned_LHF.real, turned_LHF.imag, x_LHK[..., 2 * half :]), -1)


def moved(layer: Lightning, w: Tensors, transition_H: torch.Tensor, state_HKK: torch.Tensor) -> torch.Tensor:
    return transition_H[:, None, None] * state_HKK


RING = {"scale": 16**-0.5, "rotary": Rotary(8), "norm_groups": 2}
LIGHTNING = Recurrence(
    shapes={
        "minimax": Lightning(WIDTH, 4, 16, tuple(alibi_slopes(4)), activated=True, normed=False, by_head=True),
        "ring": Lightning(WIDTH, 4, 16, tuple(alibi_slopes(4)), **RING),
        "ring with biases": Lightning(WIDTH, 6, 16, tuple(alibi_slopes(6)), bias=True, out_bias=True, **RING),
        "odd heads": Lightning(WIDTH, 3, 24, (0.9, 0.03, 1e-3), activated=True, normed=False, by_head=True),
        "one norm a head": Lightning(WIDTH, 5, 8, tuple(alibi_slopes(5)), bias=True, by_head=True, norm_groups=5),
        # decays are not weights: a layer's extremes are shapes of its own
        "forgets nothing, next to nothing, and at once": Lightning(WIDTH, 5, 16, (0.0, 1e-7, 10.0, 200.0, 1e30)),
    },
    reference=reference,
    moved=moved,
    transition=lambda layer: (layer.heads,),
)
