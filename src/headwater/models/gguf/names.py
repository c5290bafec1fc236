"""Names of a GGUF file's tensors for those of Hugging Face checkpoints, with the changes that undo converters'.

What each family's converter does: conversion/*.py of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headwater.models.gguf.changes import Change, grouped, inputs, less_one, logarithm, of_heads, plain, rows, then

Config = dict[str, Any]
Sources = dict[str, tuple[str, Change]]  # a tensor of the file, and the change that makes it the checkpoint's


@dataclass(frozen=True)
class Naming:
    """Names of a family: those of each layer, and those of the model."""

    layer: Callable[[Config], Sources]
    norm: Change = plain  # of the last norm
    prefix: str = "model."
    embedding: str = "embed_tokens.weight"
    final_norm: str = "norm.weight"


def sources(architecture: str, config: Config) -> Sources:
    """Return where each tensor of a checkpoint is found in a file, by the checkpoint's names."""
    naming = NAMINGS[architecture]
    found: Sources = {
        naming.prefix + naming.embedding: ("token_embd.weight", plain),
        naming.prefix + naming.final_norm: ("output_norm.weight", naming.norm),
        "lm_head.weight": ("output.weight", plain),
    }
    for ours, (theirs, change) in naming.layer(config).items():
        for i in range(config["num_hidden_layers"]):
            found[f"{naming.prefix}layers.{i}.{ours}"] = (f"blk.{i}.{theirs}", change)
    return found


def _renamed(at: str, **names: str) -> Sources:
    """Return weights that are only called otherwise: theirs by ours."""
    return {f"{at}{ours}.weight": (f"{theirs}.weight", plain) for ours, theirs in names.items()}


def _attention(norm: Change) -> Sources:
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    norms: Sources = {f"self_attn.{x}_norm.weight": (f"attn_{x}_norm.weight", norm) for x in "qk"}
    return _renamed("self_attn.", **names) | norms


def _feed_forward() -> Sources:
    """An MLP, or experts; in a file either is missing."""
    found = _renamed("mlp.", gate="ffn_gate_inp", shared_expert_gate="ffn_gate_inp_shexp")
    for part in ("gate", "up", "down"):
        found |= _renamed("mlp.", **{f"{part}_proj": f"ffn_{part}"})
        found |= _renamed("mlp.shared_expert.", **{f"{part}_proj": f"ffn_{part}_shexp"})
        found[f"mlp.experts.{part}_proj"] = (f"ffn_{part}_exps.weight", plain)
    found["mlp.experts.gate_up_proj"] = ("ffn_gate_up_exps.weight", plain)
    return found


def _qwen3(config: Config) -> Sources:
    return {
        **_renamed("", input_layernorm="attn_norm", post_attention_layernorm="ffn_norm"),
        **_attention(plain),
        **_feed_forward(),
    }


def _delta_net(config: Config, order_H: torch.Tensor) -> Sources:
    """Value heads are found at `order_H`: in the projections' rows, in the convolution's channels and in out_proj."""
    width, before = config["linear_value_head_dim"], 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads, values = rows(order_H), rows(of_heads(order_H, width))
    mixed = rows(of_heads(order_H, width, before))
    linear: Sources = {
        "in_proj_qkv.weight": ("attn_qkv.weight", mixed),
        "in_proj_z.weight": ("attn_gate.weight", values),
        "in_proj_b.weight": ("ssm_beta.weight", heads),
        "in_proj_a.weight": ("ssm_alpha.weight", heads),
        "conv1d.weight": ("ssm_conv1d.weight", mixed),
        "A_log": ("ssm_a", then(logarithm, heads)),
        "dt_bias": ("ssm_dt.bias", heads),
        "norm.weight": ("ssm_norm.weight", plain),
        "out_proj.weight": ("ssm_out.weight", inputs(order_H, width)),
    }
    return {
        "input_layernorm.weight": ("attn_norm.weight", less_one),
        "post_attention_layernorm.weight": ("post_attention_norm.weight", less_one),
        **{f"linear_attn.{ours}": source for ours, source in linear.items()},
        **_attention(less_one),
        **_feed_forward(),
    }


def _qwen35(config: Config) -> Sources:
    return _delta_net(config, grouped(config["linear_num_key_heads"], config["linear_num_value_heads"]))


def _qwen3next(config: Config) -> Sources:
    """Value heads stay with their key heads; b and a are one tensor, key head by key head: b of its heads, then a."""
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    b_H, a_H = (part.flatten() for part in torch.arange(2 * v_heads).view(k_heads, 2, -1).unbind(1))
    return _delta_net(config, torch.arange(v_heads)) | {
        "linear_attn.in_proj_b.weight": ("ssm_ba.weight", rows(b_H)),
        "linear_attn.in_proj_a.weight": ("ssm_ba.weight", rows(a_H)),
    }


NAMINGS: dict[str, Naming] = {
    "qwen3": Naming(_qwen3),
    "qwen35": Naming(_qwen35, norm=less_one),
    "qwen35moe": Naming(_qwen35, norm=less_one),
    "qwen3moe": Naming(_qwen3),
    "qwen3next": Naming(_qwen3next, norm=less_one),
}
