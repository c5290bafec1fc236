"""Costs of known models, from their published configurations: no weights, no torch."""

from headwater.models.profiles.profile import Profile
from headwater.models.profiles.table import PROFILES, load_profile

__all__ = ["PROFILES", "Profile", "load_profile"]
