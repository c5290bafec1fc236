"""Rotation of attention as a config.json describes it, or as `--rope-scaling` changes it. No torch.

The keys are in `rope_scaling` (its kind is `rope_type` or `type`) or in the newer `rope_parameters`, either for all
layers or for each type of layer; the base and the share of channels may be next to them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from headwater.config_keys import ConfigKeys, text_config
from headwater.errors import CheckpointError
from headwater.layers.attention import Rotary
from headwater.layers.rotary_scaling import Divided, Linear, Llama3, Proportional, Scaling, Yarn, mscale
from headwater.models.families.family import FULL
from headwater.setting import SettingError

DESCRIPTIONS = ("rope_parameters", "rope_scaling")  # the second precedes
TRAINED = "original_max_position_embeddings"
LENGTHS = ("max_position_embeddings", "model_max_length")
MODEL_KEYS = ("rope_theta", "partial_rotary_factor", TRAINED)  # of a model, if its kind of scaling is changed
OLDER = {"su": "longrope", "mrope": "default"}  # names; positions of text are the same on all axes of mrope
DYNAMIC = "its angles depend on the length of each sequence, so no prefix is reusable: use --rope-scaling yarn:FACTOR"

Scaled = tuple[Scaling | None, float]  # with the factor of cosines and sines


def read_rotary(
    keys: ConfigKeys, head_dim: int, share: float = 1.0, theta: float = 10_000.0, layer_type: str = FULL
) -> Rotary:
    """Read the rotation of `partial_rotary_factor` (by default `share`) of a head's channels."""
    kind, rope = _described(keys, layer_type)
    part = rope.number("partial_rotary_factor", share)
    dim = int(head_dim * part)
    if dim % 2 or not 0 < dim <= head_dim:
        raise CheckpointError(f"config.json: {dim} of {head_dim} channels rotate, must be an even number of them")
    if kind == "proportional":
        scaling = Proportional(dim // 2, rope.number("factor", 1.0))
        return Rotary(head_dim, rope.number("rope_theta", theta), scaling=scaling)
    return rotary_of(keys, dim, theta, layer_type=layer_type)


def rotary_of(
    keys: ConfigKeys, dim: int, theta: float | None = None, neighbours: bool = False, layer_type: str = FULL
) -> Rotary:
    """Read the rotation of `dim` channels. Raises CheckpointError for a kind of scaling that is not computed."""
    kind, rope = _described(keys, layer_type)
    if kind == "dynamic":
        raise CheckpointError(f"config.json: key 'rope_type' is 'dynamic': {DYNAMIC}")
    if kind not in KINDS:
        raise CheckpointError(f"config.json: key 'rope_type' is {kind!r}, must be one of {', '.join(KINDS)}")
    scaling, amplitude = KINDS[kind](rope, dim // 2)
    return Rotary(dim, rope.number("rope_theta", theta), neighbours, scaling, amplitude)


def latent_scale(keys: ConfigKeys, key_dim: int) -> float | None:
    """Return the factor of latent attention's scores if `mscale_all_dim` changes it (DeepSeek-V2); None: 1/√key_dim."""
    kind, rope = _described(keys, FULL)
    all_dim = rope.number("mscale_all_dim", 0.0)
    return None if kind == "default" or not all_dim else key_dim**-0.5 * mscale(_factor(rope), all_dim) ** 2


def longest(keys: ConfigKeys, length_key: str, default: int) -> int:
    """Return the tokens for which a model was trained, or to which its rotation is scaled."""
    kind, rope = _described(keys, FULL)
    length = rope.positive(length_key, default)
    if kind not in STRETCHING or rope.optional(TRAINED) is None:
        return length
    return max(length, int(rope.positive(TRAINED) * _factor(rope)))


def with_rope_scaling(config: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a config.json with its rotation changed as the setting `rope_scaling` has it. Raises SettingError."""
    scaling, model = _parsed(text), text_config(config)
    length = next((model[key] for key in LENGTHS if key in model), None)
    own = {TRAINED: length} | {key: value for name in DESCRIPTIONS for key, value in (model.get(name) or {}).items()}
    by_type = {key: value for key, value in own.items() if isinstance(value, dict)}

    def changed(rotation: dict[str, Any]) -> dict[str, Any]:
        """Keep all keys of a rotation if its kind stays."""
        return {
            key: rotation[key] for key in (MODEL_KEYS if "rope_type" in scaling else rotation) if key in rotation
        } | scaling

    rotations = {key: changed({TRAINED: length} | value) for key, value in by_type.items()}
    part = {"rope_parameters": rotations or changed(own), "rope_scaling": None}
    return config | ({"text_config": model | part} if "text_config" in config else part)


def _parsed(text: str) -> dict[str, Any]:
    """Return the keys of a JSON object, or of KIND:FACTOR."""
    kind, _, factor = text.partition(":")
    try:
        keys = json.loads(text) if text.lstrip().startswith("{") else {"rope_type": kind, "factor": float(factor or 1)}
    except ValueError:
        keys = None
    if not isinstance(keys, dict):
        raise SettingError("rope_scaling", repr(text), "must be KIND:FACTOR, as yarn:4, or a JSON object")
    renamed = {"rope_type": keys["type"]} if "type" in keys else {}
    return renamed | keys


def _described(keys: ConfigKeys, layer_type: str) -> tuple[str, ConfigKeys]:
    """Return the kind of a rotation, and all keys with its own in front."""
    kind, own = "default", dict[str, Any]()
    for name in DESCRIPTIONS:
        part = keys.optional(name) or {}
        if isinstance(part, dict) and any(isinstance(value, dict) for value in part.values()):
            part = part.get(layer_type)  # a rotation for each type of layer
        if not isinstance(part, dict):
            why = f"is {keys.optional(name)!r}, must be an object, or have one for layers of type {layer_type!r}"
            raise CheckpointError(f"config.json: key {name!r} {why}")
        named = ConfigKeys({"rope_type": part.get("rope_type", part.get("type"))})
        kind = kind if named.optional("rope_type") is None else named.text("rope_type")
        own |= part
    return OLDER.get(kind, kind), keys.with_values(own)


def _factor(rope: ConfigKeys) -> float:
    """Return how many times longer than in the training sequences are; by default the ratio of both lengths."""
    trained = rope.optional(TRAINED)
    factor = rope.number("factor", None if trained is None else _length(rope) / _trained(rope))
    if factor <= 0:
        raise CheckpointError(f"config.json: key 'factor' is {factor}, must be more than 0")
    return factor


def _trained(rope: ConfigKeys) -> int:
    return rope.positive(TRAINED) if rope.optional(TRAINED) is not None else _length(rope)


def _length(rope: ConfigKeys) -> int:
    return rope.positive(next((key for key in LENGTHS if rope.optional(key) is not None), LENGTHS[0]))


def _linear(rope: ConfigKeys, pairs: int) -> Scaled:
    return Linear(_factor(rope)), 1.0


def _llama3(rope: ConfigKeys, pairs: int) -> Scaled:
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    return Llama3(_factor(rope), low, high, _trained(rope)), 1.0


def _yarn(rope: ConfigKeys, pairs: int) -> Scaled:
    factor, of_all = _factor(rope), rope.number("mscale_all_dim", 0.0)
    amplitude = mscale(factor)
    if rope.number("mscale", 0.0) and of_all:
        amplitude = mscale(factor, rope.number("mscale")) / mscale(factor, of_all)
    fast, slow = rope.number("beta_fast", 0.0) or 32.0, rope.number("beta_slow", 0.0) or 1.0
    yarn = Yarn(factor, _trained(rope), fast, slow, rope.flag("truncate", True))
    return yarn, rope.number("attention_factor", amplitude)


def _longrope(rope: ConfigKeys, pairs: int) -> Scaled:
    """Choose the factors of short or long sequences by the configured length, once.

    Other engines choose by the length of each sequence: one that grows beyond the training's would need all its keys
    again, and its prefix would be of no use to a shorter one.
    """
    trained = _trained(rope)
    key = "long_factor" if _length(rope) > trained else "short_factor"
    divisors = rope.listed(key, [])
    if len(divisors) != pairs or not all(type(x) in (int, float) and x > 0 for x in divisors):
        raise CheckpointError(f"config.json: key {key!r} is {divisors!r}, must be {pairs} numbers above 0")
    factor = rope.number("factor", _length(rope) / trained)
    amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return Divided(tuple(map(float, divisors))), rope.number("attention_factor", amplitude)


STRETCHING = ("linear", "llama3", "yarn")
KINDS: dict[str, Callable[[ConfigKeys, int], Scaled]] = {
    "default": lambda rope, pairs: (None, 1.0),
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": lambda rope, pairs: (Proportional(pairs, rope.number("factor", 1.0)), 1.0),
    "yarn": _yarn,
}
