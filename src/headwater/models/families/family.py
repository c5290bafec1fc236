"""What a family of checkpoints says: how its config.json is read. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwater.config_keys import ConfigKeys
from headwater.spec import Architecture


@dataclass(frozen=True)
class Refusal:
    """A part that the model code does not have, and what is said to a config.json that asks for it."""

    part: str  # as people call it: "biases of attention"
    keys: dict[str, Any]  # what such a config.json has
    error: str  # part of what it is refused with


@dataclass(frozen=True)
class Family:
    """One way to configure and store models; nothing but its own file knows it."""

    name: str  # as people call it
    model_types: tuple[str, ...]  # of its text models' config.json
    read: Callable[[ConfigKeys], Architecture]  # raises CheckpointError that names the key it does not take
    oracle: str = ""  # what tests compare logits with
    profile: str = ""  # the lab's profile that docs/families.md gives its sizes of
    refuses: tuple[Refusal, ...] = ()  # beside what all families refuse


def only(part: str, key: str, asked: Any, taken: Any) -> Refusal:
    """Of a key that has one value only."""
    return Refusal(part, {key: asked}, f"key {key!r} is {asked!r}, only {taken!r} is supported")
