"""Readers of config keys that several families share."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from headwater.config_keys import MAX_NUMBER, ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.architecture import Architecture, Block, MtpHead, Part
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts
from headwater.layers.layer import Layer
from headwater.models.families.rotation import longest

MAX_LAYERS = 10_000  # far above any model: a config.json that asks for more is broken


def block(i: int, norm: str, layer: Layer, at: str, within: str = "", **names: str) -> Block:
    """Build `x += layer(norm(x))` of a model's i-th layer, by the usual names: `layers.i.norm`, `layers.i.at`.

    `within` precedes these; `names` are (ours=theirs) parts of tensors' names that this family calls otherwise.
    """
    first = f"{within}layers.{i}"
    return Block(f"{first}.{norm}.weight", (Part(layer, f"{first}.{at}", tuple(names.items())),))


def mtp_head(first: str, blocks: Iterable[Block], last: str) -> MtpHead:
    """Build an MTP head by DeepSeek's names: `first` is the prefix of its input's, `last` of its final norm's."""
    own = (f"{first}.enorm.weight", f"{first}.hnorm.weight", f"{first}.eh_proj.weight")
    return MtpHead(*own, tuple(blocks), f"{last}.final_layernorm.weight")


def architecture(
    keys: ConfigKeys,
    blocks: Iterable[Block],
    length: int,
    norm_eps: float,
    length_key: str = "max_position_embeddings",
    tied: bool = False,
    **fields: Any,
) -> Architecture:
    """Return a model of these blocks; `length` and `tied` are used if their keys are missing.

    `fields` are others of `Architecture`, in which this family differs from most.
    """
    return Architecture(
        model_type=keys.text("model_type"),
        vocab_size=keys.positive("vocab_size"),
        hidden_size=keys.positive("hidden_size"),
        blocks=tuple(blocks),
        max_length=longest(keys, length_key, length),
        norm_eps=norm_eps,
        tied=keys.flag("tie_word_embeddings", tied),
        **fields,
    )


def count(keys: ConfigKeys) -> int:
    """Return the number of layers."""
    n = keys.positive("num_hidden_layers")
    if n > MAX_LAYERS:
        raise CheckpointError(f"config.json: key 'num_hidden_layers' is {n:,}, at most {MAX_LAYERS:,} are taken")
    return n


def types(keys: ConfigKeys, known: tuple[str, ...], default: list[str], key: str = "layer_types") -> tuple[str, ...]:
    """Read one of the `known` names for each layer; `default` has one for each, used if the key is missing."""
    names = _of_layers(keys, key, default)
    check_types(names, known)
    return tuple(names)


def _of_layers(keys: ConfigKeys, key: str, default: list[Any]) -> list[Any]:
    """Read a list with an entry for each layer."""
    found = keys.listed(key, default)
    if len(found) != len(default):
        raise CheckpointError(f"config.json: key {key!r} has {len(found)} entries for {len(default)} layers")
    return found


def limits(keys: ConfigKeys, key: str, n_layers: int) -> tuple[float, ...]:
    """Read a limit for each layer; 0 and null are none."""
    found = _of_layers(keys, key, [None] * n_layers)
    for i, limit in enumerate(found):
        if limit is not None and (type(limit) not in (int, float) or not 0 <= limit < MAX_NUMBER):
            raise CheckpointError(f"config.json: key {key!r} is {limit!r} for layer {i}, must be 0 or more, or null")
    return tuple(limit or 0.0 for limit in found)


def check_types(names: list[Any], known: Collection[str]) -> None:
    """Raise CheckpointError for a name that is not among the known ones."""
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise CheckpointError(f"config.json: layer type {name!r} is not one of {sorted(known)}")


def head_dim(keys: ConfigKeys, default: int | None = None) -> int:
    """Read the channels of an attention head; by default the model's width is divided among the heads."""
    return keys.positive("head_dim", default or keys.positive("hidden_size") // keys.positive("num_attention_heads"))


def attention(keys: ConfigKeys, head_dim: int, **fields: Any) -> GroupedAttention:
    """Read numbers of heads; `fields` are others of `GroupedAttention`."""
    keys.divides("num_key_value_heads", "num_attention_heads")
    heads, kv_heads = keys.positive("num_attention_heads"), keys.positive("num_key_value_heads")
    return GroupedAttention(keys.positive("hidden_size"), heads, kv_heads, head_dim, **fields)


def experts(keys: ConfigKeys, experts: int, per_token: int, width: str = "intermediate_size", **fields: Any) -> Experts:
    """Return experts, `per_token` of them a token; `width` is the key of their size, `fields` others of `Experts`."""
    if per_token > experts:
        raise CheckpointError(f"config.json: {per_token} experts a token of {experts} experts")
    return Experts(keys.positive("hidden_size"), experts, per_token, keys.positive(width), **fields)


def grouped_experts(keys: ConfigKeys, per_token: int, groups: int, chosen: int, shared: int, **fields: Any) -> Experts:
    """Read experts chosen from the best groups by sigmoid scores and a correction, and `shared` ones as one."""
    experts, width = keys.positive("num_experts"), keys.positive("moe_intermediate_size")
    if experts % groups or chosen > groups or per_token > experts // groups * chosen:
        raise CheckpointError(
            f"config.json: {per_token} experts a token of {chosen} groups of {groups}, in which {experts} experts are"
        )
    sizes = (keys.positive("hidden_size"), experts, per_token, width, width * shared)
    return Experts(*sizes, scores="sigmoid", corrected=True, groups=groups, groups_per_token=chosen, **fields)


def said(keys: ConfigKeys, *names: str) -> str:
    """Return the first of these keys that the config has, else the first: writers name some keys differently."""
    return next((name for name in names if keys.optional(name) is not None), names[0])


def numbers(keys: ConfigKeys, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    """Read as many numbers as the default has; infinities may be plain or in transformers' notation."""
    found = [_plain(value) for value in keys.listed(key, list(default))]
    if len(found) != len(default) or any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in found):
        raise CheckpointError(f"config.json: key {key!r} is {found!r}, must be {len(default)} numbers")
    return tuple(float(x) for x in found)


def _plain(value: Any) -> Any:
    """Return the number in {"__float__": "Infinity"}."""
    tagged = value.get("__float__") if isinstance(value, dict) else None
    return float(tagged) if tagged in ("Infinity", "-Infinity", "NaN") else value
