"""Families of checkpoints, one a file, and how the config.json of any of them is read. No torch."""

from headwater.models.families.family import Family, Refusal
from headwater.models.families.table import FAMILIES, read_config, read_folder

__all__ = ["FAMILIES", "Family", "Refusal", "read_config", "read_folder"]
