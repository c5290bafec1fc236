"""Costs of known models, from their published configurations, and of checkpoint folders: no weights, no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from headwater.errors import ConfigError
from headwater.hub_name import name_of
from headwater.models.families import read_folder
from headwater.models.files import config_file
from headwater.models.profiles import hybrids, marconi, qwen
from headwater.models.profiles.profile import Profile
from headwater.spec import ModelSpec

__all__ = ["PROFILES", "Profile", "load_profile", "profile_named", "profile_of"]

GROUPS = (marconi, qwen, hybrids)
PROFILES: dict[str, Profile] = {profile.name: profile for group in GROUPS for profile in group.MODELS}


def load_profile(name: str, weights: str = "auto") -> Profile:
    """Return a profile by its name, or the profile of a checkpoint's folder.

    `weights`: how weights are held. Raises ConfigError for a name that is neither, CheckpointError if the folder's
    config.json cannot be read.
    """
    if name in PROFILES:
        return replace(PROFILES[name], weights=weights)
    folder = Path(name)
    if not config_file(folder).is_file():
        raise ConfigError(f"{name!r} is neither a folder with a config.json nor a profile of {', '.join(PROFILES)}")
    return profile_of(read_folder(folder, weights=weights), folder)


def profile_of(spec: ModelSpec, folder: Path) -> Profile:
    """Return the profile of a model's spec, named after its folder, or ORG/NAME in a hub's cache."""
    return profile_named(name_of(folder), str(config_file(folder)), spec)


def profile_named(name: str, source: str, spec: ModelSpec) -> Profile:
    """Return the profile of a model's spec."""
    return Profile(
        name=name,
        source=source,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        layers=tuple(Counter(spec.layers).items()),
        dtype_name=spec.dtype_name,
        weight_dtype=spec.weight_dtype,
        weights=spec.weights,
        packed=spec.packed,
        tied=spec.tied,
        norms=1 + len(spec.blocks),
    )
