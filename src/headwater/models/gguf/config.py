"""Configuration of a model from a GGUF file's metadata, by the keys of a config.json. No torch.

What each family's converter writes: conversion/*.py of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headwater.config_keys import checked
from headwater.errors import CheckpointError
from headwater.layers.rotary_scaling import mscale
from headwater.models.gguf.file import GgufHeader, read_header
from headwater.models.gguf.held import FLOAT32, packed

ENDS = ("eos", "eot", "eom")  # tokens that end an answer
HARMONY_ENDS = ("<|return|>", "<|call|>")  # the same in harmony, gpt-oss's format of messages
Config = dict[str, Any]


class Facts:
    """Metadata of one architecture, by the rest of their keys, and the names of a layer's tensors."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.layers = int(self.need("block_count")) - int(self.get("nextn_predict_layers", 0))
        if self.layers > len(header.tensors):
            raise CheckpointError(f"{header.path}: {self.layers:,} layers of {len(header.tensors):,} tensors")

    def get(self, name: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.header.architecture}.{name}", default)

    def need(self, name: str) -> Any:
        """Return a value. Raises CheckpointError if its key is missing."""
        return self.header.need(f"{self.header.architecture}.{name}")

    def most(self, name: str) -> int:
        """Return a number, or the largest of those that some layers have."""
        value = self.need(name)
        return int(max(value)) if isinstance(value, list) else int(value)

    def epsilon(self) -> float:
        """Return what norms add to a variance; Nemotron-H's files may only have it under the name of other norms."""
        found = self.get("attention.layer_norm_rms_epsilon", self.get("attention.layer_norm_epsilon"))
        return float(self.need("attention.layer_norm_rms_epsilon") if found is None else found)

    def has(self, layer: int, name: str) -> bool:
        return f"blk.{layer}.{name}.weight" in self.header.tensors

    def types(self, name: str, other: str = "linear_attention") -> list[str]:
        """Return the type of each layer: full attention for those that have a tensor of this name."""
        return ["full_attention" if self.has(i, name) else other for i in range(self.layers)]

    def rows(self, layer: int, name: str) -> int:
        """Return the outputs of a layer's tensor."""
        return self.header.tensors[f"blk.{layer}.{name}.weight"].shape[-2]


def gguf_config(path: Path) -> Config:
    """Return the keys of the model in a file. Raises CheckpointError for an architecture that is not read."""
    header = read_header(path)
    if header.architecture not in CONFIGS:
        if header.architecture == "clip":
            raise CheckpointError(f"{path}: this is a vision tower (mmproj): name the model's own file")
        known = ", ".join(sorted(CONFIGS))
        raise CheckpointError(f"{path}: a GGUF file of architecture {header.architecture!r} is not one of {known}")
    with checked(path):
        facts = Facts(header)
        return _common(facts) | CONFIGS[header.architecture](facts)


def _common(facts: Facts) -> Config:
    header, table = facts.header, facts.header.tensors.get("token_embd.weight")
    if table is None:
        raise CheckpointError(f"{header.path}: tensor 'token_embd.weight' is missing from the file")
    return {
        "vocab_size": table.shape[0],
        "hidden_size": facts.need("embedding_length"),
        "num_hidden_layers": facts.layers,
        "max_position_embeddings": facts.need("context_length"),
        "rms_norm_eps": facts.epsilon(),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "float32" if table.type == FLOAT32 else "bfloat16",
        "packed": packed(header),
        "eos_token_id": _ends(header.metadata),
    }


def _ends(metadata: Mapping[str, Any]) -> list[int]:
    return list({end: 0 for name in ENDS if (end := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None})


def _attention(facts: Facts) -> Config:
    """Return heads and rotation."""
    heads = facts.most("attention.head_count")
    head_dim = facts.get("attention.key_length", facts.need("embedding_length") // heads)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": facts.most("attention.head_count_kv"),
        "head_dim": head_dim,
        "rope_theta": float(facts.get("rope.freq_base", 10_000.0)),
        "partial_rotary_factor": facts.get("rope.dimension_count", head_dim) / head_dim,
        "rope_scaling": _rope_scaling(facts),
    }


def _rope_scaling(facts: Facts) -> Config | None:
    """Return how frequencies are scaled: by metadata, or by tensors with a divisor of each.

    A file without a type but with a factor is scaled linearly. The factor of YaRN's cosines is written without the part
    that follows from its factor.
    """
    header, factor = facts.header, facts.get("rope.scaling.factor", facts.get("rope.scale_linear", 0.0))
    kind = facts.get("rope.scaling.type", "linear" if factor else "none")
    trained = facts.get("rope.scaling.original_context_length", facts.need("context_length"))
    attention = facts.get("rope.scaling.attn_factor", 1.0)
    same, short, long = (header.numbers(f"rope_{name}.weight") for name in ("freqs", "factors_short", "factors_long"))
    if same or (short and long):
        trained_for = {"original_max_position_embeddings": trained, "attention_factor": attention}
        return {"rope_type": "longrope", "short_factor": same or short, "long_factor": same or long, **trained_for}
    if kind != "yarn":
        return None if kind == "none" or factor == 1 else {"rope_type": kind, "factor": factor}
    if facts.get("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise CheckpointError(f"{header.path}: a file with a YaRN extrapolation factor other than 1 is not read")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained,
        "attention_factor": attention * mscale(factor),
        "beta_fast": facts.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": facts.get("rope.scaling.yarn_beta_slow"),
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
        "layer_types": facts.types("attn_q"),
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


def _mamba2(facts: Facts) -> Config:
    """Return sizes of a Mamba-2 layer by the keys that begin with `mamba_`."""
    return {
        "mamba_d_ssm": facts.need("ssm.inner_size"),
        "mamba_n_heads": facts.need("ssm.time_step_rank"),
        "mamba_n_groups": facts.need("ssm.group_count"),
        "mamba_d_state": facts.need("ssm.state_size"),
        "mamba_d_conv": facts.need("ssm.conv_kernel"),
        "mamba_conv_bias": _convolution_has_bias(facts),
    }


def _unprefixed(facts: Facts) -> Config:
    """Return sizes of a recurrent layer by the keys that Mamba, Mamba-2 and Nemotron-H share."""
    return {
        "conv_kernel": facts.need("ssm.conv_kernel"),
        "use_conv_bias": _convolution_has_bias(facts),
        "layer_norm_epsilon": facts.epsilon(),
    }


def _convolution_has_bias(facts: Facts) -> bool:
    return any(f"blk.{i}.ssm_conv1d.bias" in facts.header.tensors for i in range(facts.layers))


def _granite(facts: Facts) -> Config:
    """Read Granite 4; its multipliers are metadata."""
    attention = _attention(facts)
    rotates = facts.get("rope.scaling.finetuned", False)
    config = {
        "model_type": "granitemoehybrid",
        "layer_types": facts.types("attn_q"),
        "num_local_experts": facts.get("expert_count", 0),
        "position_embedding_type": "rope" if rotates else "nope",
        "attention_multiplier": facts.get("attention.scale") or attention["head_dim"] ** -0.5,
        "embedding_multiplier": facts.get("embedding_scale", 1.0),
        "residual_multiplier": facts.get("residual_scale", 1.0),
        "logits_scaling": facts.get("logit_scale", 1.0),
    }
    if config["num_local_experts"]:
        config |= {
            "num_experts_per_tok": facts.need("expert_used_count"),
            "intermediate_size": facts.rows(0, "ffn_gate_exps"),
            "shared_intermediate_size": facts.rows(0, "ffn_gate_shexp"),
        }
    else:
        config["shared_intermediate_size"] = facts.rows(0, "ffn_gate")
    share = attention["partial_rotary_factor"] if rotates else 1.0
    return attention | {"partial_rotary_factor": share} | _mamba2(facts) | config


def _falcon_h1(facts: Facts) -> Config:
    """Read Falcon-H1; its multipliers are part of the weights."""
    return {
        **_attention(facts),
        **_mamba2(facts),
        "model_type": "falcon_h1",
        "intermediate_size": facts.most("feed_forward_length"),
        "mamba_rms_norm": facts.has(0, "ssm_norm"),
        "mamba_norm_before_gate": False,  # as llama.cpp computes it
    }


NEMOTRON_KINDS = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}


def _nemotron(facts: Facts) -> Config:
    """Read Nemotron-H; the kind of a layer follows from its tensors."""
    kinds = [
        next((kind for name, kind in NEMOTRON_KINDS.items() if facts.has(i, name)), "none") for i in range(facts.layers)
    ]
    heads = facts.need("ssm.time_step_rank")
    config = {
        "model_type": "nemotron_h",
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": facts.need("ssm.inner_size") // heads,
        "n_groups": facts.need("ssm.group_count"),
        "ssm_state_size": facts.need("ssm.state_size"),
        "intermediate_size": facts.most("feed_forward_length"),
    }
    if "moe" in kinds:
        config |= {
            "n_routed_experts": facts.need("expert_count"),
            "num_experts_per_tok": facts.need("expert_used_count"),
            "moe_intermediate_size": facts.need("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": facts.need("expert_shared_feed_forward_length"),
            "n_group": facts.get("expert_group_count", 1),
            "topk_group": facts.get("expert_group_used_count", 1),
            "norm_topk_prob": facts.get("expert_weights_norm", True),
            "routed_scaling_factor": facts.get("expert_weights_scale", 1.0),
            "moe_latent_size": facts.get("moe_latent_size", 0),
        }
    return _attention(facts) | _unprefixed(facts) | config


def _pure_mamba2(facts: Facts) -> Config:
    heads, inner = facts.need("ssm.time_step_rank"), facts.need("ssm.inner_size")
    return _unprefixed(facts) | {
        "model_type": "mamba2",
        "n_groups": facts.need("ssm.group_count"),
        "num_heads": heads,
        "head_dim": inner // heads,
        "state_size": facts.need("ssm.state_size"),
        "expand": inner // facts.need("embedding_length"),
    }


def _pure_mamba(facts: Facts) -> Config:
    """Read Mamba, and Falcon Mamba, which norms the step, B and C."""
    normed = facts.get("ssm.dt_b_c_rms", False)
    return _unprefixed(facts) | {
        "model_type": "falcon_mamba" if normed else "mamba",
        "intermediate_size": facts.need("ssm.inner_size"),
        "state_size": facts.need("ssm.state_size"),
        "time_step_rank": facts.need("ssm.time_step_rank"),
        **({"mixer_rms_eps": facts.epsilon()} if normed else {}),
    }


def _every(layers: list[int], n_layers: int, kind: str) -> Config:
    """Return period and offset of layers of a kind."""
    offset = layers[0] if layers else 0
    period = layers[1] - offset if len(layers) > 1 else max(n_layers, 1)
    if layers and [*range(offset, n_layers, period)] != layers:
        raise CheckpointError(f"layers {layers} of the file are not one in {period}, as a Jamba's must be")
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": offset}


def _jamba(facts: Facts) -> Config:
    """Read Jamba; layers of attention and of experts follow from their tensors."""
    layers, routed = range(facts.layers), [i for i in range(facts.layers) if facts.has(i, "ffn_gate_inp")]
    return {
        **_attention(facts),
        **_every([i for i in layers if facts.has(i, "attn_q")], facts.layers, "attn"),
        **_every(routed, facts.layers, "expert"),
        "model_type": "jamba",
        "intermediate_size": facts.most("feed_forward_length"),
        "num_experts": facts.need("expert_count") if routed else 1,
        "num_experts_per_tok": facts.need("expert_used_count") if routed else 1,
        "mamba_d_state": facts.need("ssm.state_size"),
        "mamba_d_conv": facts.need("ssm.conv_kernel"),
        "mamba_dt_rank": facts.need("ssm.time_step_rank"),
        "mamba_expand": facts.need("ssm.inner_size") // facts.need("embedding_length"),
        "mamba_conv_bias": _convolution_has_bias(facts),
    }


def _lfm2(facts: Facts) -> Config:
    """Read LFM2; widths of its MLPs are those of the tensors."""
    config = {
        "model_type": "lfm2",
        "layer_types": facts.types("attn_q", "conv"),
        "conv_L_cache": facts.need("shortconv.l_cache"),
        "norm_eps": facts.need("attention.layer_norm_rms_epsilon"),
        "intermediate_size": facts.most("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
    }
    if facts.get("expert_count", 0):
        config |= _experts(facts) | {
            "model_type": "lfm2_moe",
            "num_dense_layers": facts.get("leading_dense_block_count", 0),
            "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in facts.header.tensors),
        }
    return _attention(facts) | config


def _kimi(facts: Facts) -> Config:
    """Read Kimi-Linear; it has as many heads in both kinds of attention, and positions in none."""
    heads, rope_dim = facts.most("attention.head_count"), facts.need("rope.dimension_count")
    return {
        "model_type": "kimi_linear",
        "layer_types": facts.types("attn_kv_a_mqa"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": facts.get("attention.q_lora_rank", 0),
        "kv_lora_rank": facts.need("attention.kv_lora_rank"),
        "qk_nope_head_dim": facts.need("attention.key_length_mla") - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": facts.need("attention.value_length_mla"),
        "linear_num_heads": heads,
        "linear_head_dim": facts.need("kda.head_dim"),
        "linear_conv_kernel_dim": facts.need("ssm.conv_kernel"),
        "intermediate_size": facts.most("feed_forward_length"),
        "first_k_dense_replace": facts.get("leading_dense_block_count", 0),
        **_experts(facts),
        "num_shared_experts": facts.get("expert_shared_count", 0),
        "routed_scaling_factor": facts.get("expert_weights_scale", 1.0),
    }


def _gpt_oss(facts: Facts) -> Config:
    """Read gpt-oss; files have neither the limit of experts nor the unrounded bounds of YaRN's ramp."""
    attention, tokens = _attention(facts), facts.header.metadata.get("tokenizer.ggml.tokens", [])
    scaling, pattern = attention["rope_scaling"], facts.get("attention.sliding_window_pattern", 2)
    slides = pattern if isinstance(pattern, list) else [i % pattern < pattern - 1 for i in range(facts.layers)]
    return attention | {
        "model_type": "gpt_oss",
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "sliding_window": facts.need("attention.sliding_window"),
        "num_local_experts": facts.need("expert_count"),
        "num_experts_per_tok": facts.need("expert_used_count"),
        "intermediate_size": facts.need("expert_feed_forward_length"),
        "rope_scaling": scaling and scaling | {"truncate": False},
        "eos_token_id": [tokens.index(end) for end in HARMONY_ENDS if end in tokens] or _ends(facts.header.metadata),
    }


CONFIGS: dict[str, Callable[[Facts], Config]] = {
    "falcon-h1": _falcon_h1,
    "gpt-oss": _gpt_oss,
    "granitehybrid": _granite,
    "jamba": _jamba,
    "kimi-linear": _kimi,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "mamba": _pure_mamba,
    "mamba2": _pure_mamba2,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
    "qwen3": _qwen3,
    "qwen35": _delta_net,
    "qwen35moe": _delta_net,
    "qwen3moe": _qwen3,
    "qwen3next": _delta_net,
}
