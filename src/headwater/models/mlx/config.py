"""Folders that mlx-lm or mlx-vlm wrote: how they are known, and how their config.json is read. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headwater.config_keys import text_config
from headwater.errors import CheckpointError
from headwater.unreadable import LONGEST_HEADER

# of mlx-lm's model code, by `model_type`: families whose tensors it renames or reshapes, but does not compute with
FAMILIES = (
    "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen3", "qwen3_moe",
    "granitemoehybrid", "nemotron_h", "jamba", "mamba", "falcon_mamba", "mamba2", "kimi_linear",
    "bailing_moe_linear", "bailing_hybrid", "gpt_oss",
)  # fmt: skip
CENTRED_NORMS = ("qwen3_5", "qwen3_next")  # beginnings of types whose norms' weights are stored as w, and here as 1 + w


def is_mlx(weights: Path) -> bool:
    """Return whether the metadata of a file in safetensors' format name MLX; False for a file that cannot be read."""
    try:
        with weights.open("rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), LONGEST_HEADER)))
        return bool(header["__metadata__"]["format"] == "mlx")
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def mlx_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration by the keys of Hugging Face checkpoints. Raises CheckpointError for other families."""
    text = text_config(config)
    model_type = text.get("model_type") or config.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"config.json: MLX folders of model_type {model_type!r} are not read, only of {', '.join(FAMILIES)}; "
            "take the checkpoint that this folder was converted from"
        )
    if str(model_type).startswith(CENTRED_NORMS):
        text = {**text, "norm_offset": 0.0}
    return {**config, "text_config": text} if "text_config" in config else text
