"""Families of checkpoints, one a file; all of them by `model_type`, and how a config.json is read. No torch."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from headwater.config_keys import ConfigKeys, checked, text_config
from headwater.errors import CheckpointError
from headwater.hub_name import HubName
from headwater.models.families.family import Family, Refusal, only
from headwater.models.families.quantised import check_quantisation, packed
from headwater.models.families.rotation import with_rope_scaling
from headwater.models.files import model_config
from headwater.setting import SettingError
from headwater.spec import ModelSpec

__all__ = ["ALL_REFUSE", "FAMILIES", "Family", "Refusal", "read_config", "read_folder"]

FILES = (
    "qwen3_5",
    "qwen3_next",
    "qwen3",
    "granite",
    "bamba",
    "mamba2",
    "minimax",
    "ring",
    "jamba",
    "kimi_linear",
    "bailing_hybrid",
    "ling_2_5",
    "falcon_h1",
    "nemotron_h",
    "mamba",
    "lfm2",
    "gpt_oss",
    "olmo_hybrid",
    "lara_mini",
)
FAMILIES: tuple[Family, ...] = tuple(import_module(f"{__name__}.{file}").FAMILY for file in FILES)
ALL_REFUSE = (
    Refusal(
        "other methods of quantisation",
        {"quantization_config": {"quant_method": "quark"}},
        "quantised weights of 'quark' are not one of ",
    ),
    Refusal("another family", {"model_type": "gpt2"}, "model_type 'gpt2' is not one of "),
    Refusal("other classes of a family's model type", {"architectures": ["OtherModel"]}, "key 'architectures' is "),
    only("limited activations", "swiglu_limit", 7.0, None),
)
MODEL_TYPES = tuple(dict.fromkeys(model_type for family in FAMILIES for model_type in family.model_types))


def read_config(
    config: dict[str, Any], dtype: str, page_size: int = 64, weights: str = "auto", rope_scaling: str | None = None
) -> ModelSpec:
    """Read a text model's config.json, or the `text_config` within one of a multimodal checkpoint.

    `dtype` is the one to compute in, `weights` how weights are held, `rope_scaling` a change of the rotation. Raises
    CheckpointError where a key is missing, of the wrong type, or asks for something the model code does not do.
    """
    with checked("config.json"):
        return _read(config, dtype, page_size, weights, rope_scaling)


def _read(config: dict[str, Any], dtype: str, page_size: int, weights: str, rope_scaling: str | None) -> ModelSpec:
    keys = ConfigKeys(with_rope_scaling(config, rope_scaling) if rope_scaling else config)
    # A multimodal config may leave the text model's type out; then its own stands for it.
    model_type = text_config(config).get("model_type", config.get("model_type"))
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise CheckpointError(f"config.json: model_type {model_type!r} is not one of {known}")
    check_quantisation(config)
    family = family_of(config, model_type)
    for key, value in filter(None, (refusal.required for refusal in (*family.refuses, *ALL_REFUSE))):
        if key not in family.reads:
            keys.require(key, value, default=value)
    spec = ModelSpec.of(family.read(keys), dtype, page_size, weights, stored_dtype(config))
    if rope_scaling and not any(getattr(layer, "rotary", None) for layer in spec.layers):
        raise SettingError("rope_scaling", repr(rope_scaling), f"but no layer of a {family.name} model rotates")
    return replace(spec, packed=packed(config, stored_dtype(config)))


def family_of(config: dict[str, Any], model_type: str) -> Family:
    """Return the family of a model type that has a class which a config names; the first if it names none.

    Raises CheckpointError for classes that are of none: another model, or another head.
    """
    families = [family for family in FAMILIES if model_type in family.model_types]
    named = config.get("architectures") or text_config(config).get("architectures") or []
    named = named if isinstance(named, list) else [named]
    found = [family for family in families if not named or any(name in family.architectures for name in named)]
    if not found:
        known = ", ".join(name for family in families for name in family.architectures)
        raise CheckpointError(
            f"config.json: key 'architectures' is {named!r}: of model_type {model_type!r} only {known} are read"
        )
    return found[0]


def stored_dtype(config: dict[str, Any]) -> str:
    """Return the dtype that a config.json gives its weights; bfloat16 if it gives none."""
    named = [part.get(key) for part in (text_config(config), config) for key in ("dtype", "torch_dtype")]
    return next((name for name in named if isinstance(name, str)), "bfloat16")


def read_folder(
    folder: Path, dtype: str = "auto", page_size: int = 64, weights: str = "auto", rope_scaling: str | None = None
) -> ModelSpec:
    """Read the config.json of a folder, or a GGUF file; `auto` is the dtype that its weights are stored in.

    Raises CheckpointError that names the model.
    """
    config = model_config(folder)
    try:
        return read_config(config, stored_dtype(config) if dtype == "auto" else dtype, page_size, weights, rope_scaling)
    except CheckpointError as error:
        raise CheckpointError(f"{HubName.of_folder(folder) or folder}: {error}") from error
