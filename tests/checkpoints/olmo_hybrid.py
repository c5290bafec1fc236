"""OLMo-Hybrid: Gated DeltaNet with negative eigenvalues, and attention whose norms come after it."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.recipe import Family

FULL, LINEAR = "full_attention", "linear_attention"
CONVOLUTION = "linear_attn.{}_conv1d.weight"


def as_published(folder: Path) -> None:
    """Name norms and cut convolutions as the published files have them: transformers 5.24 writes equal thirds."""
    config, file = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    tensors = load_file(file)
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    for i, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{i}."
        if kind == FULL:
            tensors[f"{at}post_attention_layernorm.weight"] = tensors.pop(f"{at}feedforward_layer_norm.weight")
            continue
        names = [at + CONVOLUTION.format(part) for part in "qkv"]
        whole = torch.cat([tensors[name] for name in names])
        for name, taps in zip(names, whole.split([keys, keys, values]), strict=True):
            tensors[name] = taps.contiguous()
    save_file(tensors, file, {"format": "pt"})


FILL = {"b_proj.weight": lambda weight, generator: weight.normal_(0.0, 0.5, generator=generator)}  # strengths above 1
OLMO_HYBRID = Family(
    "OlmoHybridConfig",
    "OlmoHybridForCausalLM",
    {
        "layer_types": [LINEAR, FULL],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "rope_parameters": None,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
    },
    FILL,
)
RECIPES = {
    "olmo_hybrid": replace(OLMO_HYBRID.recipe(), rewrite=as_published),
    "olmo_hybrid_odd": OLMO_HYBRID.recipe(
        layer_types=[LINEAR, LINEAR, FULL],
        hidden_size=72,
        num_attention_heads=6,
        num_key_value_heads=2,
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        linear_key_head_dim=24,
        linear_value_head_dim=40,
        linear_allow_neg_eigval=False,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
    ),
}
