"""Mamba-2: S' = a S + B (dt x)ᵀ, y = S'ᵀ C + D x, with one decay a head (Dao and Gu, 2024, section 6)."""

from headwater.mixers.mamba2.layer import StateSpaceDual

__all__ = ["StateSpaceDual"]
