"""Multi-head latent attention: pages hold a compressed row a token (DeepSeek-V2, section 2.1)."""

from headwater.mixers.mla.layer import LatentAttentionMixer

__all__ = ["LatentAttentionMixer"]
