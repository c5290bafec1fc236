"""Attention over the last tokens, whose keys and values are state and part of a checkpoint."""

from headwater.mixers.window.layer import WindowAttentionMixer

__all__ = ["WindowAttentionMixer"]
