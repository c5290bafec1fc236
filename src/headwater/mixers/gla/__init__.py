"""Gated linear attention: S' = Diag(e^g) S + k vᵀ, o = S'ᵀ q (Yang et al. 2023, section 3)."""

from headwater.mixers.gla.layer import GatedLinearAttentionMixer

__all__ = ["GatedLinearAttentionMixer"]
