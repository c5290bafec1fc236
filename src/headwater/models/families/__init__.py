"""Families of checkpoints, one a file; all of them by `model_type`, and how a config.json is read. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headwater.config_keys import ConfigKeys, text_config
from headwater.errors import CheckpointError
from headwater.models.families.bailing_hybrid import BAILING_HYBRID
from headwater.models.families.bamba import BAMBA
from headwater.models.families.falcon_h1 import FALCON_H1
from headwater.models.families.family import Family, Refusal
from headwater.models.families.granite import GRANITE
from headwater.models.families.jamba import JAMBA
from headwater.models.families.kimi_linear import KIMI_LINEAR
from headwater.models.families.mamba import MAMBA
from headwater.models.families.mamba2 import MAMBA2
from headwater.models.families.minimax import MINIMAX
from headwater.models.families.nemotron_h import NEMOTRON_H
from headwater.models.families.qwen3 import QWEN3
from headwater.models.families.qwen3_5 import QWEN3_5
from headwater.models.families.qwen3_next import QWEN3_NEXT
from headwater.models.families.ring import RING
from headwater.spec import ModelSpec

__all__ = ["ALL_REFUSE", "FAMILIES", "Family", "Refusal", "read_config", "read_folder"]

FAMILIES: tuple[Family, ...] = (
    QWEN3_5,
    QWEN3_NEXT,
    QWEN3,
    GRANITE,
    BAMBA,
    MAMBA2,
    MINIMAX,
    RING,
    JAMBA,
    KIMI_LINEAR,
    BAILING_HYBRID,
    FALCON_H1,
    NEMOTRON_H,
    MAMBA,
)
ALL_REFUSE = (
    Refusal(
        "quantised weights",
        {"quantization_config": {"quant_method": "fp8"}},
        "quantised weights are not supported: 'quantization_config' is 'fp8'",
    ),
    Refusal("another family", {"model_type": "gpt2"}, "model_type 'gpt2' is not one of "),
)
BY_MODEL_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def read_config(config: dict[str, Any], dtype: str, page_size: int = 64) -> ModelSpec:
    """Read a text model's config.json, or the `text_config` within one of a multimodal checkpoint.

    `dtype` is the one to compute in. Raises CheckpointError where a key is missing, of the wrong type, or asks for
    something the model code does not do.
    """
    keys = ConfigKeys(config)
    # A multimodal config may leave the text model's type out; then its own stands for it.
    model_type = text_config(config).get("model_type", config.get("model_type"))
    if not isinstance(model_type, str) or model_type not in BY_MODEL_TYPE:
        known = ", ".join(sorted(BY_MODEL_TYPE))
        raise CheckpointError(f"config.json: model_type {model_type!r} is not one of {known}")
    quantised = config.get("quantization_config") or text_config(config).get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise CheckpointError(f"config.json: quantised weights are not supported: 'quantization_config' is {method!r}")
    family = BY_MODEL_TYPE[model_type]
    for key, value in filter(None, (refusal.required for refusal in family.refuses)):
        keys.require(key, value, default=value)
    return ModelSpec.of(family.read(keys), dtype, page_size)


def read_folder(folder: Path, dtype: str = "auto", page_size: int = 64) -> ModelSpec:
    """Read a checkpoint folder's config.json; `auto` is the dtype that its weights are kept in."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    named = [part.get(key) for part in (text_config(config), config) for key in ("dtype", "torch_dtype")]
    stored = next((name for name in named if name), "bfloat16")
    return read_config(config, stored if dtype == "auto" else dtype, page_size)
