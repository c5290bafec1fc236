"""Readers of config keys that several families share."""

from __future__ import annotations

from typing import Any

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.attention import Rotary
from headwater.layers.layer import Layer
from headwater.spec import Block, Part

MAX_LAYERS = 10_000  # far above any model: a config.json that asks for more is broken


def read_count(keys: ConfigKeys, key: str = "num_hidden_layers") -> int:
    """Return the number of layers."""
    n = keys.positive(key)
    if n > MAX_LAYERS:
        raise CheckpointError(f"config.json: key {key!r} is {n:,}, at most {MAX_LAYERS:,} are taken")
    return n


def read_types(
    keys: ConfigKeys, known: tuple[str, ...], default: list[str], key: str = "layer_types"
) -> tuple[str, ...]:
    """Read one of the `known` names for each layer; `default` has one for each, used if the key is missing."""
    names = keys.listed(key, default)
    if len(names) != len(default):
        raise CheckpointError(f"config.json: key {key!r} has {len(names)} entries for {len(default)} layers")
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise CheckpointError(f"config.json: layer type {name!r} is not one of {sorted(known)}")
    return tuple(names)


def read_rotary(keys: ConfigKeys, head_dim: int, share: float = 1.0, theta: float = 10_000.0) -> Rotary:
    """Read the rotation of `partial_rotary_factor` (by default `share`) of a head's channels."""
    keys.require("rope_type", "default", default="default")
    keys.require("rope_scaling", None, default=None)
    dim = int(head_dim * keys.number("partial_rotary_factor", share))
    if dim % 2 or not 0 < dim <= head_dim:
        raise CheckpointError(f"config.json: {dim} of {head_dim} channels rotate, must be an even number of them")
    return Rotary(dim, keys.number("rope_theta", theta))


def said(keys: ConfigKeys, *names: str) -> str:
    """Return the first of these keys that the config has, else the first: writers name some keys differently."""
    return next((name for name in names if keys.optional(name) is not None), names[0])


def read_numbers(keys: ConfigKeys, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    """Read as many numbers as the default has; infinities may be plain or in transformers' notation."""
    found = [_plain(value) for value in keys.listed(key, list(default))]
    if len(found) != len(default) or any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in found):
        raise CheckpointError(f"config.json: key {key!r} is {found!r}, must be {len(default)} numbers")
    return tuple(float(x) for x in found)


def read_step_limits(keys: ConfigKeys, key: str = "time_step_limit") -> tuple[float, float]:
    """Return the limits of a Mamba-2 layer's time steps."""
    low, high = read_numbers(keys, key, (0.0, float("inf")))
    if not 0 <= low < high:  # NaN, too
        raise CheckpointError(f"config.json: key {key!r} is {[low, high]}, must be 0 or more, and then more than that")
    return low, high


def _plain(value: Any) -> Any:
    """Return the number in {"__float__": "Infinity"}."""
    tagged = value.get("__float__") if isinstance(value, dict) else None
    return float(tagged) if tagged in ("Infinity", "-Infinity", "NaN") else value


def block(i: int, norm: str, layer: Layer, at: str, **names: str) -> Block:
    """Build `x += layer(norm(x))` of a model's i-th layer, by the usual names: `layers.i.norm`, `layers.i.at`.

    `names` are (ours=theirs) parts of tensors' names that this family calls otherwise.
    """
    return Block(f"layers.{i}.{norm}.weight", (Part(layer, f"layers.{i}.{at}", tuple(names.items())),))
