"""Names of a GGUF file's tensors for those of Hugging Face checkpoints, with the changes that undo converters'.

What each family's converter does: conversion/*.py of github.com/ggml-org/llama.cpp. It changes the order of rows or
inputs, or the form of numbers.

N outputs, K inputs, X groups of inputs, S groups of groups, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from headwater.mixers.quantised import Quantised

Weight = Tensor | Quantised
Change = Callable[[Weight], Weight]
PARTS = ("gate", "up", "down")  # weights of a gated MLP
ATTENTION = {f"{part}_proj": f"attn_{part}" for part in "qkv"}


def plain(weight: Weight) -> Weight:
    """Return the weight as it is."""
    return weight


def less_one(weight: Weight) -> Weight:
    """Return the weight of a norm that is centred at zero: converters store 1 + w.

    In float32 no bit of the gain is lost: 1 + (g − 1) is g for every g that is the sum of 1 and a float32 number.
    """
    return numbers(weight).float() - 1


def logarithm(weight: Weight) -> Weight:
    """Return the logarithm of decay rates, A_log: converters store −exp(A_log)."""
    return numbers(weight).double().neg().log().float()


def flat(weight: Weight) -> Weight:
    """Return a vector that converters store group by group, or with a dimension of size 1."""
    return numbers(weight).flatten()


def numbers(weight: Weight) -> Tensor:
    """Return the numbers of a weight in any format."""
    return weight.values() if isinstance(weight, Quantised) else weight


def rows(order_N: Tensor) -> Change:
    """Return the change that puts row `order_N[n]` at n."""

    def change(weight: Weight) -> Weight:
        return weight.rows(order_N) if isinstance(weight, Quantised) else weight[order_N]

    return change


def inputs(order_R: Tensor, run: int) -> Change:
    """Return the change that puts run `order_R[r]`, each of `run` inputs, at r."""

    def change(weight: Weight) -> Weight:
        if not isinstance(weight, Quantised):
            return _runs(weight, run, order_R)
        return _in_runs(weight, run, order_R)

    return change


def _runs(part_NK: Tensor, run: int, order_R: Tensor) -> Tensor:
    moved: Tensor = part_NK.unflatten(1, (-1, run))[:, order_R]
    return moved.flatten(1)


def _in_runs(weight: Quantised, run: int, order_R: Tensor) -> Quantised:
    """Reorder inputs with their scales; a group that lies in several runs is cut, each part with the group's scale."""
    parts: dict[str, Any] = {"code_NK": _runs(weight.code_NK, run, order_R)}
    for name in ("scale_NX", "zero_NX", "minimum_NX", "outer_scale_NS", "outer_minimum_NS"):
        part_NX: Tensor | None = getattr(weight, name)
        if part_NX is not None and part_NX.shape[1] > 1:
            size = weight.shape[1] // part_NX.shape[1]  # of a group, or of a group of groups
            cut = gcd(size, run)
            parts[name] = _runs(part_NX.repeat_interleave(size // cut, 1), run // cut, order_R)
    return replace(weight, **parts)


def grouped(k_heads: int, v_heads: int) -> Tensor:
    """Return the places of value heads, in the order of key heads, among heads that are tiled.

    Converters store head v of key head k at v · k_heads + k; checkpoints have it at k · (v_heads / k_heads) + v.
    """
    return torch.arange(v_heads).view(-1, k_heads).T.flatten()


def of_heads(order_H: Tensor, width: int, before: int = 0) -> Tensor:
    """Return the order of rows, `width` of a head, for an order of heads; `before` rows stay in front."""
    row_HW = order_H[:, None] * width + torch.arange(width)
    return torch.cat([torch.arange(before), before + row_HW.flatten()])


def unpermuted(heads: int, head_dim: int) -> Tensor:
    """Return the order of rows of queries or keys whose converter put rotated pairs of channels side by side."""
    order: Tensor = torch.arange(heads * head_dim).view(heads, head_dim // 2, 2).transpose(1, 2)
    return order.flatten()


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
    output_norm: str = "output_norm.weight"  # the file's name of the last norm
    has_mtp: bool = False  # converters write an MTP head, after the last layer


def sources(architecture: str, config: Config) -> Sources:
    """Return where each tensor of a checkpoint is found in a file, by the checkpoint's names."""
    naming = NAMINGS[architecture]
    found: Sources = {
        naming.prefix + naming.embedding: ("token_embd.weight", plain),
        naming.prefix + naming.final_norm: (naming.output_norm, naming.norm),
        "lm_head.weight": ("output.weight", plain),
    }
    for ours, (theirs, change) in naming.layer(config).items():
        for i in range(config["num_hidden_layers"]):
            found[f"{naming.prefix}layers.{i}.{ours}"] = (f"blk.{i}.{theirs}", change)
    return found | (_mtp(naming, config) if naming.has_mtp else {})


def _mtp(naming: Naming, config: Config) -> Sources:
    """Return the sources of an MTP head: a layer like others, two norms and a product before it, a norm after it."""
    at = f"blk.{config['num_hidden_layers']}"
    norms = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
    return {
        **{
            f"mtp.layers.0.{ours}": (f"{at}.{theirs}", change)
            for ours, (theirs, change) in naming.layer(config).items()
        },
        **{f"mtp.{ours}.weight": (f"{at}.nextn.{theirs}.weight", naming.norm) for ours, theirs in norms.items()},
        "mtp.fc.weight": (f"{at}.nextn.eh_proj.weight", plain),
    }


def _renamed(at: str, **names: str) -> Sources:
    """Return weights that are only called otherwise: theirs by ours."""
    return {f"{at}{ours}.weight": (f"{theirs}.weight", plain) for ours, theirs in names.items()}


def _attention(norm: Change) -> Sources:
    norms: Sources = {f"self_attn.{x}_norm.weight": (f"attn_{x}_norm.weight", norm) for x in "qk"}
    return _renamed("self_attn.", **ATTENTION, o_proj="attn_output") | norms


def _mlp(at: str, end: str = "") -> Sources:
    """Return the weights of a gated MLP, whose names in the file have this end."""
    return _renamed(at, **{f"{part}_proj": f"ffn_{part}{end}" for part in PARTS})


def _experts(at: str) -> Sources:
    """Return the joined weights of gated experts."""
    return {f"{at}{part}_proj": (f"ffn_{part}_exps.weight", plain) for part in PARTS}


def _feed_forward() -> Sources:
    """An MLP, or experts; in a file either is missing."""
    return {
        **_renamed("mlp.", gate="ffn_gate_inp", shared_expert_gate="ffn_gate_inp_shexp"),
        **_mlp("mlp."),
        **_mlp("mlp.shared_expert.", "_shexp"),
        **_experts("mlp.experts."),
        "mlp.experts.gate_up_proj": ("ffn_gate_up_exps.weight", plain),
    }


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
        "A_log": ("ssm_a", lambda weight: heads(logarithm(weight))),
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


def _mamba2(at: str) -> Sources:
    vectors = {
        "A_log": ("ssm_a", lambda weight: flat(logarithm(weight))),
        "D": ("ssm_d", flat),
        "dt_bias": ("ssm_dt.bias", plain),
    }
    return {
        **_renamed(at, in_proj="ssm_in", conv1d="ssm_conv1d", out_proj="ssm_out"),
        **{at + ours: source for ours, source in vectors.items()},
        f"{at}conv1d.bias": ("ssm_conv1d.bias", plain),
        f"{at}norm.weight": ("ssm_norm.weight", flat),
    }


def _permuted_attention(config: Config, at: str) -> Sources:
    """Queries and keys whose channels a converter reordered for another form of rotation."""
    found = _renamed(at, v_proj="attn_v", o_proj="attn_output")
    for x, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        order = rows(unpermuted(config[heads], config["head_dim"]))
        for kind in ("weight", "bias"):
            found[f"{at}{x}_proj.{kind}"] = (f"attn_{x}.{kind}", order)
    return found


def _granite(config: Config) -> Sources:
    """An MLP stands below the layer itself, as does what its family reads from joined tensors."""
    mlp = _renamed("", gate_proj="ffn_gate", up_proj="ffn_up", **{"shared_mlp.output_linear": "ffn_down"})
    routed = {
        **_renamed("block_sparse_moe.", **{"router.layer": "ffn_gate_inp", "output_linear": "ffn_down_exps"}),
        **_renamed("shared_expert.", gate_proj="ffn_gate_shexp", up_proj="ffn_up_shexp"),
        **_renamed("shared_mlp.", output_linear="ffn_down_shexp"),
        **{f"experts.{part}_proj": (f"ffn_{part}_exps.weight", plain) for part in ("gate", "up")},
    }
    return {
        **_renamed("", input_layernorm="attn_norm", post_attention_layernorm="ffn_norm"),
        **_mamba2("mamba."),
        **_permuted_attention(config, "self_attn."),
        **(routed if config["num_local_experts"] else mlp),
    }


def _falcon_h1(config: Config) -> Sources:
    return {
        **_renamed("", input_layernorm="attn_norm"),
        "pre_ff_layernorm.weight": ("ffn_norm", plain),  # without an ending
        **_mamba2("mamba."),
        **_attention(plain),
        **_mlp("feed_forward."),
    }


def _nemotron(config: Config) -> Sources:
    shared = {"up_proj": "ffn_up_shexp", "down_proj": "ffn_down_shexp"}
    latent = {"fc1_latent_proj": "ffn_latent_down", "fc2_latent_proj": "ffn_latent_up"}
    return {
        **_renamed("", norm="attn_norm"),
        **_mamba2("mixer."),
        **_permuted_attention(config, "mixer."),
        **_renamed("mixer.", up_proj="ffn_up", down_proj="ffn_down", gate="ffn_gate_inp", **latent),
        **_renamed("mixer.shared_experts.", **shared),
        **{f"mixer.experts.{part}_proj": (f"ffn_{part}_exps.weight", plain) for part in ("up", "down")},
        "mixer.gate.e_score_correction_bias": ("exp_probs_b.bias", plain),
    }


def _mamba(at: str) -> Sources:
    """A step has a weight here, which Mamba-2's has not, and rates stand channel by channel."""
    names = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "x_proj": "ssm_x", "dt_proj": "ssm_dt", "out_proj": "ssm_out"}
    return {
        **_renamed(at, **names),
        f"{at}conv1d.bias": ("ssm_conv1d.bias", plain),
        f"{at}dt_proj.bias": ("ssm_dt.bias", plain),
        f"{at}A_log": ("ssm_a", logarithm),
        f"{at}D": ("ssm_d", plain),
    }


def _jamba(config: Config) -> Sources:
    norms = {f"{part}_layernorm": f"ssm_{part}_norm" for part in ("dt", "b", "c")}
    return {
        **_renamed("", input_layernorm="attn_norm", pre_ff_layernorm="ffn_norm"),
        **_mamba("mamba."),
        **_renamed("mamba.", **norms),
        **_attention(plain),
        **_renamed("feed_forward.", router="ffn_gate_inp"),
        **_mlp("feed_forward."),
        **_experts("feed_forward.experts."),
    }


def _lfm2(config: Config) -> Sources:
    norms = {f"{x}_layernorm": f"attn_{x}_norm" for x in "qk"}
    attention = ATTENTION | {"out_proj": "attn_output"}
    return {
        **_renamed("", operator_norm="attn_norm", ffn_norm="ffn_norm"),
        **_renamed("conv.", **{name: f"shortconv.{name}" for name in ("in_proj", "conv", "out_proj")}),
        **_renamed("self_attn.", **attention, **norms),
        **_renamed("feed_forward.", w1="ffn_gate", w3="ffn_up", w2="ffn_down", gate="ffn_gate_inp"),
        **_experts("feed_forward.experts."),
        "feed_forward.expert_bias": ("exp_probs_b.bias", plain),
    }


def _kimi(config: Config) -> Sources:
    """Delta attention and latent attention have tensors of one name, which are their own."""
    latent = {f"{x}_proj": f"attn_{x}" for x in ("q_a", "q_b", "kv_b")} | {"kv_a_proj_with_mqa": "attn_kv_a_mqa"}
    latent |= {f"{x}_a_layernorm": f"attn_{x}_a_norm" for x in ("q", "kv")}
    delta = {f"{x}_proj": f"ssm_{x}" for x in ("f_a", "f_b", "g_a", "g_b")}
    delta |= {f"{x}_conv1d": f"ssm_conv1d_{x}" for x in "qkv"}
    moe = "block_sparse_moe."
    return {
        **_renamed("", input_layernorm="attn_norm", post_attention_layernorm="ffn_norm"),
        **_attention(plain),
        **_renamed("self_attn.", b_proj="ssm_beta", o_norm="ssm_norm", **latent, **delta),
        "self_attn.A_log": ("ssm_a", lambda weight: flat(logarithm(weight))),
        "self_attn.dt_bias": ("ssm_dt.bias", plain),
        **_mlp("mlp."),
        **_mlp(f"{moe}shared_experts.", "_shexp"),
        **_renamed(moe, gate="ffn_gate_inp"),
        **_experts(f"{moe}experts."),
        f"{moe}gate.e_score_correction_bias": ("exp_probs_b.bias", plain),
    }


def _gpt_oss(config: Config) -> Sources:
    attention = ATTENTION | {"o_proj": "attn_output"}
    places = {f"self_attn.{ours}": theirs for ours, theirs in attention.items()} | {"mlp.router": "ffn_gate_inp"}
    return {
        **_renamed("", input_layernorm="attn_norm", post_attention_layernorm="post_attention_norm", **places),
        **{f"{ours}.bias": (f"{theirs}.bias", plain) for ours, theirs in places.items()},
        **_experts("mlp.experts."),
        **{f"mlp.experts.{part}_proj_bias": (f"ffn_{part}_exps.bias", plain) for part in PARTS},
        "self_attn.sinks": ("attn_sinks.weight", plain),
    }


LFM2 = Naming(_lfm2, final_norm="embedding_norm.weight", output_norm="token_embd_norm.weight")


def _backbone(layer: Callable[[Config], Sources]) -> Naming:
    return Naming(layer, prefix="backbone.", embedding="embeddings.weight", final_norm="norm_f.weight")


def _pure(mixer: Callable[[str], Sources]) -> Naming:
    """Name layers with nothing but a mixer."""
    return _backbone(lambda config: _renamed("", norm="attn_norm") | mixer("mixer."))


NAMINGS: dict[str, Naming] = {
    "falcon-h1": Naming(_falcon_h1, final_norm="final_layernorm.weight"),
    "gpt-oss": Naming(_gpt_oss),
    "granitehybrid": Naming(_granite),
    "kimi-linear": Naming(_kimi),
    "jamba": Naming(_jamba, final_norm="final_layernorm.weight"),
    "lfm2": LFM2,
    "lfm2moe": LFM2,
    "mamba": _pure(_mamba),
    "mamba2": _pure(_mamba2),
    "nemotron_h": _backbone(_nemotron),
    "nemotron_h_moe": _backbone(_nemotron),
    "qwen3": Naming(_qwen3),
    "qwen35": Naming(_qwen35, norm=less_one, has_mtp=True),
    "qwen35moe": Naming(_qwen35, norm=less_one, has_mtp=True),
    "qwen3moe": Naming(_qwen3),
    "qwen3next": Naming(_qwen3next, norm=less_one),
}
