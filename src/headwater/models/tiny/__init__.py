"""The embedded default checkpoint: a tiny Qwen3.5-style text model with random weights, made on the spot.

Its answers are noise and its caching is real. Three things make it fit for that: only words that encode back to
themselves are ever likely (all other rows of the head are zero), so answers do not end early and come back in the next
turn as the tokens that were generated; the recurrent states decay slowly, so a wrong state changes the text; and a
checkpoint of states weighs as much as many hundred tokens of KV, as in large models.
"""

from headwater.models.tiny.checkpoint import ensure_default

__all__ = ["ensure_default"]
