"""Lightning attention: S' = λ S + k vᵀ, o = S'ᵀ q, with a fixed decay λ a head (Qin et al. 2024; RetNet before it)."""

from headwater.mixers.lightning.layer import LightningAttention

__all__ = ["LightningAttention"]
