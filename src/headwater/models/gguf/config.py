"""Configuration of a model from a GGUF file's metadata, by the keys of a config.json. No torch.

What each family's converter writes: conversion/*.py of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwater.errors import CheckpointError
from headwater.models.gguf.file import GgufHeader, read_header

FLOAT32 = 0  # a tensor's type
ENDS = ("eos", "eot", "eom")  # tokens that end an answer
Config = dict[str, Any]


class Facts:
    """Metadata of one architecture, by the rest of their keys, and the names of a layer's tensors."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.layers = int(self.need("block_count")) - int(self.get("nextn_predict_layers", 0))

    def get(self, name: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.header.architecture}.{name}", default)

    def need(self, name: str) -> Any:
        """Return a value. Raises CheckpointError if its key is missing."""
        return self.header.need(f"{self.header.architecture}.{name}")

    def most(self, name: str) -> int:
        """Return a number, or the largest of those that some layers have."""
        value = self.need(name)
        return int(max(value)) if isinstance(value, list) else int(value)

    def has(self, layer: int, name: str) -> bool:
        return f"blk.{layer}.{name}.weight" in self.header.tensors

    def rows(self, layer: int, name: str) -> int:
        """Return the outputs of a layer's tensor."""
        return self.header.tensors[f"blk.{layer}.{name}.weight"].shape[-2]


def gguf_config(path: Path) -> Config:
    """Return the keys of the model in a file. Raises CheckpointError for an architecture that is not read."""
    header = read_header(path)
    if header.architecture not in CONFIGS:
        known = ", ".join(sorted(CONFIGS))
        raise CheckpointError(f"{path}: a GGUF file of architecture {header.architecture!r} is not one of {known}")
    facts = Facts(header)
    return _common(facts) | CONFIGS[header.architecture](facts)


def _common(facts: Facts) -> Config:
    header = facts.header
    table = header.tensors.get("token_embd.weight")
    if table is None:
        raise CheckpointError(f"{header.path}: tensor 'token_embd.weight' is missing from the file")
    ends = (header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS)
    return {
        "vocab_size": table.shape[0],
        "hidden_size": facts.need("embedding_length"),
        "num_hidden_layers": facts.layers,
        "max_position_embeddings": facts.need("context_length"),
        "rms_norm_eps": facts.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "float32" if table.type == FLOAT32 else "bfloat16",
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
    }


def _attention(facts: Facts) -> Config:
    """Return heads and rotation; a scaled rotation stays in the config, so that its family refuses it."""
    heads = facts.most("attention.head_count")
    head_dim = facts.get("attention.key_length", facts.need("embedding_length") // heads)
    scaling = facts.get("rope.scaling.type", "none")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": facts.most("attention.head_count_kv"),
        "head_dim": head_dim,
        "rope_theta": float(facts.get("rope.freq_base", 10_000.0)),
        "partial_rotary_factor": facts.get("rope.dimension_count", head_dim) / head_dim,
        "rope_scaling": None if scaling == "none" else {"type": scaling},
    }


def _experts(facts: Facts) -> Config:
    """Return the sizes of experts; layers without a router have an MLP."""
    return {
        "num_experts": facts.need("expert_count"),
        "num_experts_per_tok": facts.need("expert_used_count"),
        "moe_intermediate_size": facts.need("expert_feed_forward_length"),
        "mlp_only_layers": [i for i in range(facts.layers) if not facts.has(i, "ffn_gate_inp")],
        "norm_topk_prob": True,
    }


def _delta_net(facts: Facts) -> Config:
    """Read Qwen3.5 and Qwen3-Next: in a GGUF file the latter's projections stand one by one as well."""
    heads = facts.need("ssm.time_step_rank")
    routed = bool(facts.get("expert_count", 0))
    config = {
        "model_type": "qwen3_5_moe_text" if routed else "qwen3_5_text",
        "layer_types": [
            "full_attention" if facts.has(i, "attn_q") else "linear_attention" for i in range(facts.layers)
        ],
        "intermediate_size": facts.get("feed_forward_length", 0) if routed else facts.most("feed_forward_length"),
        "linear_conv_kernel_dim": facts.need("ssm.conv_kernel"),
        "linear_key_head_dim": facts.need("ssm.state_size"),
        "linear_value_head_dim": facts.need("ssm.inner_size") // heads,
        "linear_num_key_heads": facts.need("ssm.group_count"),
        "linear_num_value_heads": heads,
    }
    if routed:
        shared = facts.get("expert_shared_feed_forward_length")
        config |= _experts(facts) | {"shared_expert_intermediate_size": shared or facts.rows(0, "ffn_gate_shexp")}
    return config | _attention(facts)


def _qwen3(facts: Facts) -> Config:
    if not facts.get("expert_count", 0):
        return {"model_type": "qwen3", "intermediate_size": facts.most("feed_forward_length")} | _attention(facts)
    dense = {"intermediate_size": facts.get("feed_forward_length", 0)}
    return {"model_type": "qwen3_moe"} | dense | _experts(facts) | _attention(facts)


CONFIGS: dict[str, Callable[[Facts], Config]] = {
    "qwen3": _qwen3,
    "qwen35": _delta_net,
    "qwen35moe": _delta_net,
    "qwen3moe": _qwen3,
    "qwen3next": _delta_net,
}
