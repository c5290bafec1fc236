"""What a family of checkpoints says: how its config.json is read. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwater.config_keys import ConfigKeys
from headwater.spec import Architecture


@dataclass(frozen=True)
class Family:
    """One way to configure and store models; nothing but its own file knows it."""

    name: str  # as people call it
    model_types: tuple[str, ...]  # of its text models' config.json
    read: Callable[[ConfigKeys], Architecture]  # raises CheckpointError that names the key it does not take
