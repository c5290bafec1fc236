"""Gated DeltaNet: S' = e^g S + k (β (v − e^g Sᵀk))ᵀ, o = S'ᵀ q (Yang, Kautz and Hatamizadeh, 2024, section 3)."""

from headwater.mixers.gdn.layer import GatedDeltaNet

__all__ = ["GatedDeltaNet"]
