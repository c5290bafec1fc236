"""All profiles by name, and those of checkpoint folders."""

from __future__ import annotations

from pathlib import Path

from headwater.errors import ConfigError
from headwater.models.families import read_folder
from headwater.models.profiles import kimi, ling, mamba, marconi, minimax, qwen, ring
from headwater.models.profiles.folder import profile_of
from headwater.models.profiles.profile import Profile

FAMILIES = (marconi, qwen, ring, minimax, kimi, ling, mamba)
PROFILES: dict[str, Profile] = {profile.name: profile for family in FAMILIES for profile in family.MODELS}


def load_profile(name: str, dtype: str = "auto") -> Profile:
    """Return a profile by its name, or the profile of a checkpoint's folder.

    `dtype` is of a folder's model; "auto" is the one that its weights are kept in. Raises ConfigError for a name that
    is neither, CheckpointError where a folder's config.json cannot be read.
    """
    if name in PROFILES:
        return PROFILES[name]
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{name!r} is no folder with a config.json, and no profile of {', '.join(PROFILES)}")
    return profile_of(read_folder(folder, dtype), folder)
