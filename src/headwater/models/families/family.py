"""Family of checkpoints: the reader of its config.json, and the configurations that it refuses. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwater.config_keys import ConfigKeys
from headwater.spec import Architecture


@dataclass(frozen=True)
class Refusal:
    """Unsupported part of a model, and the error for a config.json that has it."""

    part: str  # in plain words: "biases of attention"
    keys: dict[str, Any]  # keys of such a config.json
    error: str  # part of the error text


@dataclass(frozen=True)
class Family:
    """Family of models with one configuration format; only the family's own file depends on it."""

    name: str  # display name
    model_types: tuple[str, ...]  # `model_type` of its text models' config.json
    read: Callable[[ConfigKeys], Architecture]  # raises CheckpointError that names an unsupported key
    oracle: str = ""  # implementation with which tests compare logits
    profile: str = ""  # lab profile whose sizes docs/families.md shows
    refuses: tuple[Refusal, ...] = ()  # in addition to the refusals of all families


def only(part: str, key: str, asked: Any, taken: Any) -> Refusal:
    """Return the refusal of all values of a key except the one that is supported."""
    return Refusal(part, {key: asked}, f"key {key!r} is {asked!r}, only {taken!r} is supported")
