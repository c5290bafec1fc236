"""Kimi Delta Attention: S' = Diag(e^g) S + k (β (v − (Diag(e^g) S)ᵀk))ᵀ, o = S'ᵀ q (Kimi Linear, 2025, equation 1)."""

from headwater.mixers.kda.layer import KimiDeltaAttention

__all__ = ["KimiDeltaAttention"]
