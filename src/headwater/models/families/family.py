"""Family of checkpoints: the reader of its config.json, and the configurations that it refuses. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwater.config_keys import ConfigKeys
from headwater.layers.architecture import Architecture

LINEAR, FULL = "linear_attention", "full_attention"  # layer types, as most configurations name them


@dataclass(frozen=True)
class Refusal:
    """Unsupported part of a model, and the error for a config.json that has it."""

    part: str  # in plain words: "biases of attention"
    keys: dict[str, Any]  # keys of such a config.json
    error: str  # part of the error text
    required: tuple[str, Any] | None = None  # a key and its only supported value, which a missing key has, too


@dataclass(frozen=True)
class Family:
    """Family of models with one configuration format; only the family's own file depends on it."""

    name: str  # display name
    model_types: tuple[str, ...]  # `model_type` of its text models' config.json
    read: Callable[[ConfigKeys], Architecture]  # raises CheckpointError that names an unsupported key
    architectures: tuple[str, ...]  # names of its classes in `architectures` of config.json
    profile: str  # lab profile whose sizes docs/families.md shows
    refuses: tuple[Refusal, ...]  # in addition to the refusals of all families
    reads: tuple[str, ...] = ()  # keys with values that all other families refuse
    oracle: str = "transformers"  # implementation with which tests compare logits


def only(part: str, key: str, asked: Any, taken: Any, always: bool = True) -> Refusal:
    """Return the refusal of all values of a key except `taken`; with `always=False` the family's reader checks it."""
    error = f"key {key!r} is {asked!r}, only {taken!r} is supported"
    return Refusal(part, {key: asked}, error, (key, taken) if always else None)


OTHER_ACTIVATIONS = only("other activations", "hidden_act", "gelu", "silu")
DYNAMIC_ROTATION = Refusal(
    "rotation by each sequence's length (dynamic NTK)",
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "its angles depend on the length of each sequence, so no prefix is reusable",
)
OTHER_LAYERS = Refusal(
    "layers of another kind",
    {"layer_types": ["sliding_attention", FULL]},
    f"layer type 'sliding_attention' is not one of {[FULL, LINEAR]}",
)
