"""Profiles of models that a command line names: a known one, that of a folder, or that of a hub's model."""

from __future__ import annotations

from pathlib import Path

from headwater.cli.common import ANY_MODEL
from headwater.cli.download import config_folder, named
from headwater.errors import ConfigError
from headwater.models.families import read_config
from headwater.models.profiles import PROFILES, Profile, load_profile, profile_named
from headwater.traces.recordings import Served


def any_profile(name: str) -> Profile:
    """Return a profile by its name, or of a model: that of a folder, or of a hub, whose config.json is downloaded.

    Raises ConfigError, CheckpointError and DownloadError.
    """
    model = None if name in PROFILES else named(Path(name))
    return load_profile(name if model is None else str(config_folder(model)))


def profile_for(model: str | None, recorded: Served | None) -> Profile:
    """Return the profile that is named; without a name, that of the recording's model, or of ANY_MODEL.

    Raises ConfigError for a recording that does not describe its model.
    """
    if model is not None or recorded is None:
        return any_profile(model or ANY_MODEL)
    if recorded.config:
        spec = read_config(dict(recorded.config), recorded.dtype or "bfloat16", recorded.page_size)
        return profile_named(recorded.model, "the recording", spec)
    if recorded.model in PROFILES:
        return PROFILES[recorded.model]
    raise ConfigError(f"the recording does not describe its model {recorded.model!r}: name it with --model")
