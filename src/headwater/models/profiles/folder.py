"""The profile of a checkpoint's folder: the layers of its ModelSpec."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from headwater.models.profiles.profile import Profile
from headwater.spec import ModelSpec


def profile_of(spec: ModelSpec, folder: Path) -> Profile:
    """Return the profile of a model's spec, named after its folder."""
    return Profile(
        name=folder.resolve().name,
        source=str(folder / "config.json"),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        layers=tuple(Counter(spec.layers).items()),
        dtype_name=spec.dtype_name,
        weight_dtype=spec.dtype_name,
        tied=spec.tied,
        norms=1 + len(spec.blocks),
    )
