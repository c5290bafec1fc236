"""Mamba-1: h' = e^(dt A) h + dt x B, y = C h + D x for each channel (Gu and Dao, 2023, section 3)."""

from headwater.mixers.mamba.layer import SelectiveStateSpace

__all__ = ["SelectiveStateSpace"]
