"""Profiles of models that a command line names: a known one, that of a folder, or that of a hub's model."""

from __future__ import annotations

from pathlib import Path

from headwater.cli.common import ANY_MODEL, one_of
from headwater.cli.download import config_folder, named
from headwater.config import WEIGHTS
from headwater.errors import ConfigError
from headwater.models.families import read_config
from headwater.models.profiles import PROFILES, Profile, load_profile, profile_named
from headwater.traces.recordings import Served


def any_profile(name: str, weights: str = "auto") -> Profile:
    """Return a profile by its name, or of a model: that of a folder, or of a hub, whose config.json is downloaded.

    Raises ConfigError, CheckpointError and DownloadError.
    """
    model = None if name in PROFILES else named(Path(name))
    return load_profile(name if model is None else str(config_folder(model)), weights=weights)


def profile_for(model: str | None, recorded: Served | None, weights: str | None = None) -> Profile:
    """Return the profile that is named; without a name, that of the recording's model, or of ANY_MODEL.

    Weights are held as `weights` says; without it, as the recording's server held them.

    Raises ConfigError for a recording that does not describe its model.
    """
    weights = one_of("weights", weights or (recorded.weights if recorded else "") or "auto", WEIGHTS)
    if model is not None or recorded is None:
        return any_profile(model or ANY_MODEL, weights)
    if recorded.config:
        spec = read_config(dict(recorded.config), recorded.dtype or "bfloat16", recorded.page_size, weights)
        return profile_named(recorded.model, "the recording", spec)
    if recorded.model in PROFILES:
        return load_profile(recorded.model, weights=weights)
    raise ConfigError(f"the recording does not describe its model {recorded.model!r}: name it with --model")
