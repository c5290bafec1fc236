"""Conversion of Hugging Face checkpoints to GGUF files: the changes of llama.cpp's converters, family by family."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.gguf_files.blocks import ALL_FORMATS
from tests.gguf_files.writer import write

Config = dict[str, Any]
Tensors = dict[str, Tensor]
Named = Iterator[tuple[str, Tensor]]


def tiled(x: Tensor, k_heads: int, v_heads: int, dim: int = 0) -> Tensor:
    """Value heads of key heads in turn: the first of each, then the second of each."""
    x = x.movedim(dim, 0)
    heads = x.unflatten(0, (k_heads, v_heads // k_heads, -1)).transpose(0, 1)
    return heads.flatten(0, 2).movedim(0, dim).contiguous()


def renamed(tensors: Tensors, at: str, **names: str) -> Named:
    for theirs, ours in names.items():
        if f"{at}{theirs}.weight" in tensors:
            yield f"{ours}.weight", tensors[f"{at}{theirs}.weight"]


def attention(tensors: Tensors, at: str, offset: float) -> Named:
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    yield from renamed(tensors, at, **names)
    for x in "qk":
        if f"{at}{x}_norm.weight" in tensors:
            yield f"attn_{x}_norm.weight", tensors[f"{at}{x}_norm.weight"] + offset


def feed_forward(tensors: Tensors, at: str, experts: int) -> Named:
    yield from renamed(tensors, at, gate_proj="ffn_gate", up_proj="ffn_up", down_proj="ffn_down")
    yield from renamed(tensors, at, gate="ffn_gate_inp", shared_expert_gate="ffn_gate_inp_shexp")
    shared = {"gate_proj": "ffn_gate_shexp", "up_proj": "ffn_up_shexp", "down_proj": "ffn_down_shexp"}
    yield from renamed(tensors, f"{at}shared_expert.", **shared)
    if f"{at}experts.gate_up_proj" in tensors:
        gate, up = tensors[f"{at}experts.gate_up_proj"].chunk(2, 1)
        for part, of in (("gate", gate), ("up", up), ("down", tensors[f"{at}experts.down_proj"])):
            yield f"ffn_{part}_exps.weight", of
    elif f"{at}experts.0.up_proj.weight" in tensors:
        for part in ("gate", "up", "down"):
            of = [tensors[f"{at}experts.{e}.{part}_proj.weight"] for e in range(experts)]
            yield f"ffn_{part}_exps.weight", torch.stack(of)


def delta_net(c: Config, w: Tensors, at: str) -> Named:
    k_heads, v_heads, k_dim = c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_key_head_dim"]
    before = 2 * k_heads * k_dim

    def mixed(x: Tensor) -> Tensor:
        return torch.cat([x[:before], tiled(x[before:], k_heads, v_heads)])

    yield "attn_qkv.weight", mixed(w[f"{at}in_proj_qkv.weight"])
    yield "attn_gate.weight", tiled(w[f"{at}in_proj_z.weight"], k_heads, v_heads)
    yield "ssm_beta.weight", tiled(w[f"{at}in_proj_b.weight"], k_heads, v_heads)
    yield "ssm_alpha.weight", tiled(w[f"{at}in_proj_a.weight"], k_heads, v_heads)
    yield "ssm_conv1d.weight", mixed(w[f"{at}conv1d.weight"][:, 0])
    yield "ssm_a", -tiled(w[f"{at}A_log"], k_heads, v_heads).float().exp()
    yield "ssm_dt.bias", tiled(w[f"{at}dt_bias"], k_heads, v_heads)
    yield "ssm_norm.weight", w[f"{at}norm.weight"]
    yield "ssm_out.weight", tiled(w[f"{at}out_proj.weight"], k_heads, v_heads, dim=1)


def delta_net_by_key_head(c: Config, w: Tensors, at: str) -> Named:
    k_heads, v_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    shared = v_heads // k_heads * c["linear_value_head_dim"]
    of_head = w[f"{at}in_proj_qkvz.weight"].unflatten(0, (k_heads, -1))
    sizes = [c["linear_key_head_dim"]] * 2 + [shared] * 2
    q, k, v, z = (part.flatten(0, 1) for part in of_head.split(sizes, 1))
    yield "attn_qkv.weight", torch.cat([q, k, v])
    yield "attn_gate.weight", z
    yield "ssm_ba.weight", w[f"{at}in_proj_ba.weight"]
    yield "ssm_conv1d.weight", w[f"{at}conv1d.weight"][:, 0]
    yield "ssm_a", -w[f"{at}A_log"].float().exp()
    yield "ssm_dt.bias", w[f"{at}dt_bias"]
    yield "ssm_norm.weight", w[f"{at}norm.weight"]
    yield "ssm_out.weight", w[f"{at}out_proj.weight"]


def qwen_next(c: Config, w: Tensors, i: int) -> Named:
    at = f"model.layers.{i}."
    yield "attn_norm.weight", w[f"{at}input_layernorm.weight"].float() + 1
    yield "post_attention_norm.weight", w[f"{at}post_attention_layernorm.weight"].float() + 1
    mixer = delta_net_by_key_head if c["model_type"] == "qwen3_next" else delta_net
    if c["layer_types"][i] == "full_attention":
        yield from attention(w, f"{at}self_attn.", 1.0)
    else:
        yield from mixer(c, w, f"{at}linear_attn.")
    yield from feed_forward(w, f"{at}mlp.", c.get("num_experts", 0))


def mtp_head(c: Config, w: Tensors) -> Named:
    """A head of multi-token prediction, as one more layer."""
    names = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
    for theirs, ours in names.items():
        yield f"nextn.{ours}.weight", w[f"mtp.{theirs}.weight"].float() + 1
    yield "nextn.eh_proj.weight", w["mtp.fc.weight"]
    layer = {name.replace("mtp.layers.0.", "model.layers.0."): x for name, x in w.items() if name.startswith("mtp.")}
    yield from qwen_next(c | {"layer_types": ["full_attention"]}, layer, 0)


def qwen3(c: Config, w: Tensors, i: int) -> Named:
    at = f"model.layers.{i}."
    yield from renamed(w, at, input_layernorm="attn_norm", post_attention_layernorm="ffn_norm")
    yield from attention(w, f"{at}self_attn.", 0.0)
    yield from feed_forward(w, f"{at}mlp.", c.get("num_experts", c.get("num_local_experts", 0)))


def permuted(x: Tensor, heads: int) -> Tensor:
    """Channels of a head as llama.cpp rotates them: the pairs of the two halves side by side."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def permuted_attention(c: Config, w: Tensors, at: str) -> Named:
    yield from renamed(w, at, v_proj="attn_v", o_proj="attn_output")
    for x, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        if f"{at}{x}_proj.weight" in w:
            yield f"attn_{x}.weight", permuted(w[f"{at}{x}_proj.weight"], c[heads])


def mamba2_layer(w: Tensors, at: str, groups: int) -> Named:
    if f"{at}A_log" not in w:
        return
    yield from renamed(w, at, in_proj="ssm_in", out_proj="ssm_out")
    yield "ssm_conv1d.weight", w[f"{at}conv1d.weight"][:, 0]
    if f"{at}conv1d.bias" in w:
        yield "ssm_conv1d.bias", w[f"{at}conv1d.bias"]
    if f"{at}norm.weight" in w:
        yield "ssm_norm.weight", w[f"{at}norm.weight"].view(groups, -1)
    yield "ssm_a", -w[f"{at}A_log"].float().exp()[:, None]
    yield "ssm_d", w[f"{at}D"][:, None]
    yield "ssm_dt.bias", w[f"{at}dt_bias"]


def granite(c: Config, w: Tensors, i: int) -> Named:
    at = f"model.layers.{i}."
    yield from renamed(w, at, input_layernorm="attn_norm", post_attention_layernorm="ffn_norm")
    yield from mamba2_layer(w, f"{at}mamba.", c["mamba_n_groups"])
    yield from permuted_attention(c, w, f"{at}self_attn.")
    shared = "_shexp" if c["num_local_experts"] else ""
    for part, x in zip(("gate", "up"), w[f"{at}shared_mlp.input_linear.weight"].chunk(2), strict=True):
        yield f"ffn_{part}{shared}.weight", x
    yield f"ffn_down{shared}.weight", w[f"{at}shared_mlp.output_linear.weight"]
    if shared:
        moe = f"{at}block_sparse_moe."
        for part, x in zip(("gate", "up"), w[f"{moe}input_linear.weight"].chunk(2, 1), strict=True):
            yield f"ffn_{part}_exps.weight", x
        yield from renamed(w, moe, **{"output_linear": "ffn_down_exps", "router.layer": "ffn_gate_inp"})


def falcon_h1(c: Config, w: Tensors, i: int) -> Named:
    at = f"model.layers.{i}."
    yield from renamed(w, at, input_layernorm="attn_norm")
    yield "ffn_norm", w[f"{at}pre_ff_layernorm.weight"]  # without an ending
    for name, x in mamba2_layer(w, f"{at}mamba.", c["mamba_n_groups"]):
        if name == "ssm_in.weight":
            states = c["mamba_n_groups"] * c["mamba_d_state"]
            sizes = [c["mamba_d_ssm"], c["mamba_d_ssm"], states, states, c["mamba_n_heads"]]
            parts = zip(x.split(sizes), c["ssm_multipliers"], strict=True)
            x = torch.cat([part * scale for part, scale in parts]) * c["ssm_in_multiplier"]
        yield name, x * c["ssm_out_multiplier"] if name == "ssm_out.weight" else x
    into, out = c["attention_in_multiplier"], c["attention_out_multiplier"]
    scales = {"q": into, "k": into * c["key_multiplier"], "v": into, "o": out}
    for name, x in attention(w, f"{at}self_attn.", 0.0):
        yield name, x * scales[name.removeprefix("attn_")[0]]
    gate, down = c["mlp_multipliers"]
    for name, x in renamed(w, f"{at}feed_forward.", gate_proj="ffn_gate", up_proj="ffn_up", down_proj="ffn_down"):
        yield name, x * {"ffn_gate.weight": gate, "ffn_down.weight": down}.get(name, 1.0)


def nemotron(c: Config, w: Tensors, i: int) -> Named:
    at = f"backbone.layers.{i}."
    if f"{at}norm.weight" not in w:
        at = f"model.layers.{i}."
    yield from renamed(w, at, norm="attn_norm")
    yield from mamba2_layer(w, f"{at}mixer.", c["n_groups"])
    yield from permuted_attention(c, w, f"{at}mixer.")
    names = {"fc1_latent_proj": "ffn_latent_down", "fc2_latent_proj": "ffn_latent_up", "gate": "ffn_gate_inp"}
    yield from renamed(w, f"{at}mixer.", up_proj="ffn_up", down_proj="ffn_down", **names)
    yield from renamed(w, f"{at}mixer.shared_experts.", up_proj="ffn_up_shexp", down_proj="ffn_down_shexp")
    if f"{at}mixer.gate.e_score_correction_bias" in w:
        yield "exp_probs_b.bias", w[f"{at}mixer.gate.e_score_correction_bias"]
        for part in ("up", "down"):
            stacked, experts_of = f"{at}mixer.experts.{part}_proj", range(c["n_routed_experts"])
            if stacked in w:
                yield f"ffn_{part}_exps.weight", w[stacked]
            else:
                of = [w[f"{at}mixer.experts.{e}.{part}_proj.weight"] for e in experts_of]
                yield f"ffn_{part}_exps.weight", torch.stack(of)


def mamba2(c: Config, w: Tensors, i: int) -> Named:
    yield from renamed(w, f"backbone.layers.{i}.", norm="attn_norm")
    yield from mamba2_layer(w, f"backbone.layers.{i}.mixer.", c["n_groups"])


def mamba(c: Config, w: Tensors, i: int) -> Named:
    yield from renamed(w, f"backbone.layers.{i}.", norm="attn_norm")
    yield from mamba_layer(w, f"backbone.layers.{i}.mixer.")


def jamba(c: Config, w: Tensors, i: int) -> Named:
    at = f"model.layers.{i}."
    yield from renamed(w, at, input_layernorm="attn_norm", pre_ff_layernorm="ffn_norm")
    yield from attention(w, f"{at}self_attn.", 0.0)
    yield from mamba_layer(w, f"{at}mamba.")
    norms = {f"{part}_layernorm": f"ssm_{part}_norm" for part in ("dt", "b", "c")}
    yield from renamed(w, f"{at}mamba.", **norms)
    yield from renamed(w, f"{at}feed_forward.", router="ffn_gate_inp")
    yield from feed_forward(w, f"{at}feed_forward.", c["num_experts"])


def mamba_layer(w: Tensors, at: str) -> Named:
    if f"{at}A_log" not in w:
        return
    yield from renamed(w, at, in_proj="ssm_in", x_proj="ssm_x", dt_proj="ssm_dt", out_proj="ssm_out")
    yield "ssm_conv1d.weight", w[f"{at}conv1d.weight"][:, 0]
    if f"{at}conv1d.bias" in w:
        yield "ssm_conv1d.bias", w[f"{at}conv1d.bias"]
    yield "ssm_dt.bias", w[f"{at}dt_proj.bias"]
    yield "ssm_a", -w[f"{at}A_log"].float().exp()
    yield "ssm_d", w[f"{at}D"]


def lfm2(c: Config, w: Tensors, i: int) -> Named:
    at = f"model.layers.{i}."
    yield from renamed(w, at, operator_norm="attn_norm", ffn_norm="ffn_norm")
    yield from renamed(w, f"{at}conv.", in_proj="shortconv.in_proj", out_proj="shortconv.out_proj")
    if f"{at}conv.conv.weight" in w:
        yield "shortconv.conv.weight", w[f"{at}conv.conv.weight"][:, 0]
    yield from renamed(w, f"{at}self_attn.", q_proj="attn_q", k_proj="attn_k", v_proj="attn_v", out_proj="attn_output")
    yield from renamed(w, f"{at}self_attn.", q_layernorm="attn_q_norm", k_layernorm="attn_k_norm")
    yield from renamed(w, f"{at}feed_forward.", w1="ffn_gate", w3="ffn_up", w2="ffn_down", gate="ffn_gate_inp")
    if f"{at}feed_forward.gate.weight" in w:
        yield "exp_probs_b.bias", w[f"{at}feed_forward.expert_bias"]
        for ours, theirs in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            of = [w[f"{at}feed_forward.experts.{e}.{ours}.weight"] for e in range(c["num_experts"])]
            yield f"ffn_{theirs}_exps.weight", torch.stack(of)


def gpt_oss(c: Config, w: Tensors, i: int) -> Named:
    at = f"model.layers.{i}."
    yield from renamed(w, at, input_layernorm="attn_norm", post_attention_layernorm="post_attention_norm")
    yield from attention(w, f"{at}self_attn.", 0.0)
    for theirs, ours in {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}.items():
        yield f"{ours}.bias", w[f"{at}self_attn.{theirs}.bias"]
    yield "attn_sinks.weight", w[f"{at}self_attn.sinks"]
    yield from renamed(w, f"{at}mlp.", router="ffn_gate_inp")
    yield "ffn_gate_inp.bias", w[f"{at}mlp.router.bias"]
    both, down = (w[f"{at}mlp.experts.{name}"].transpose(1, 2) for name in ("gate_up_proj", "down_proj"))
    biases, of_down = (w[f"{at}mlp.experts.{name}_bias"] for name in ("gate_up_proj", "down_proj"))
    parts = {"gate": (both[:, ::2], biases[:, ::2]), "up": (both[:, 1::2], biases[:, 1::2]), "down": (down, of_down)}
    for part, (weight, bias) in parts.items():
        yield f"ffn_{part}_exps.weight", weight.contiguous()
        yield f"ffn_{part}_exps.bias", bias.contiguous()


def kimi(c: Config, w: Tensors, i: int) -> Named:
    at, moe = f"model.layers.{i}.", f"model.layers.{i}.block_sparse_moe."
    yield from renamed(w, at, input_layernorm="attn_norm", post_attention_layernorm="ffn_norm")
    yield from attention(w, f"{at}self_attn.", 0.0)
    delta = {f"{x}_proj": f"ssm_{x}" for x in ("f_a", "f_b", "g_a", "g_b")} | {
        "b_proj": "ssm_beta",
        "o_norm": "ssm_norm",
    }
    latent = {"kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_a_layernorm": "attn_kv_a_norm"}
    queries = {"q_a_proj": "attn_q_a", "q_a_layernorm": "attn_q_a_norm", "q_b_proj": "attn_q_b"}
    yield from renamed(w, f"{at}self_attn.", **delta, **latent, **queries)
    if f"{at}self_attn.A_log" in w:
        for x in "qkv":
            yield f"ssm_conv1d_{x}.weight", w[f"{at}self_attn.{x}_conv1d.weight"][:, 0][None, :, None]
        yield "ssm_a", -w[f"{at}self_attn.A_log"].float().exp().flatten()[:, None]
        yield "ssm_dt.bias", w[f"{at}self_attn.dt_bias"]
    else:
        of_head = w[f"{at}self_attn.kv_b_proj.weight"].unflatten(0, (c["num_attention_heads"], -1))
        k, v = of_head.split([c["qk_nope_head_dim"], c["v_head_dim"]], 1)
        yield from (("attn_k_b.weight", k.transpose(1, 2).contiguous()), ("attn_v_b.weight", v.contiguous()))
    for place in (f"{at}mlp.", *([moe] if f"{moe}gate.weight" not in w else [])):
        yield from renamed(w, place, gate_proj="ffn_gate", up_proj="ffn_up", down_proj="ffn_down")
    if f"{moe}gate.weight" in w:
        yield from renamed(w, moe, gate="ffn_gate_inp")
        shared = {"gate_proj": "ffn_gate_shexp", "up_proj": "ffn_up_shexp", "down_proj": "ffn_down_shexp"}
        yield from renamed(w, f"{moe}shared_experts.", **shared)
        yield "exp_probs_b.bias", w[f"{moe}gate.e_score_correction_bias"]
        for theirs, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            of = [w[f"{moe}experts.{e}.{theirs}.weight"] for e in range(c["num_experts"])]
            yield f"ffn_{ours}_exps.weight", torch.stack(of)


def kimi_sizes(c: Config) -> Config:
    rope_dim = c["qk_rope_head_dim"]
    usual = {"max_position_embeddings": c["model_max_length"], "num_experts_per_tok": c["num_experts_per_token"]}
    return common(c | usual) | {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in c["layer_types"]],
        "attention.kv_lora_rank": c["kv_lora_rank"],
        "attention.key_length": c["kv_lora_rank"] + rope_dim,
        "attention.value_length": c["kv_lora_rank"],
        "attention.key_length_mla": c["qk_nope_head_dim"] + rope_dim,
        "attention.value_length_mla": c["v_head_dim"],
        "rope.dimension_count": rope_dim,
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "kda.head_dim": c["linear_head_dim"],
        "expert_shared_count": c["num_shared_experts"],
        "expert_weights_scale": float(c["routed_scaling_factor"]),
        "expert_gating_func": 2,
        "leading_dense_block_count": c["mlp_layer_types"].index("sparse"),
        "vocab_size": c["vocab_size"],
        **({"attention.q_lora_rank": c["q_lora_rank"]} if c.get("q_lora_rank") else {}),
    }


def ssm(inner: int, state: int, conv: int, rank: int, groups: int = 0) -> Config:
    found = {"inner_size": inner, "state_size": state, "conv_kernel": conv, "time_step_rank": rank}
    found |= {"group_count": groups} if groups else {}
    return {f"ssm.{key}": of for key, of in found.items()}


def mamba_sizes(c: Config) -> Config:
    inner = c.get("mamba_d_ssm") or c["mamba_expand"] * c["hidden_size"]
    return common(c) | ssm(inner, c["mamba_d_state"], c["mamba_d_conv"], c["mamba_n_heads"], c["mamba_n_groups"])


def granite_sizes(c: Config) -> Config:
    scales = {
        "attention.scale": c["attention_multiplier"],
        "embedding_scale": c["embedding_multiplier"],
        "residual_scale": c["residual_multiplier"],
        "logit_scale": c["logits_scaling"],
        "rope.scaling.finetuned": c["position_embedding_type"] == "rope",
    }
    routed = {
        "expert_count": c["num_local_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_shared_feed_forward_length": c["shared_intermediate_size"],
    }
    # llama.cpp reads the length of an MLP under its usual name
    dense = {"feed_forward_length": c["shared_intermediate_size"]}
    heads = of_layers(c, "attention", c["num_key_value_heads"])
    return mamba_sizes(c) | scales | heads | (routed if c["num_local_experts"] else dense)


def kinds_of(c: Config) -> list[str]:
    """Whether each layer is of attention, or has a recurrence or experts."""
    kinds = c.get("layers_block_type") or c["layer_types"]
    return [kind.replace("full_", "").replace("linear_attention", "mamba") for kind in kinds]


def of_layers(c: Config, kind: str, n_heads: int) -> Config:
    """The number of key-value heads, 0 for layers of other kinds."""
    return {"attention.head_count_kv": [n_heads if found == kind else 0 for found in kinds_of(c)]}


def nemotron_sizes(c: Config) -> Config:
    inner = c["mamba_num_heads"] * c["mamba_head_dim"]
    kinds, widths = kinds_of(c), {"moe": c["moe_intermediate_size"], "mlp": c["intermediate_size"]}
    found = of_layers(c, "attention", c["num_key_value_heads"]) | {
        "feed_forward_length": [widths.get(kind, 0) for kind in kinds],
        "attention.layer_norm_epsilon": float(c["layer_norm_epsilon"]),
    }
    routed = {
        "expert_shared_count": c["n_shared_experts"],
        "expert_group_count": c["n_group"],
        "expert_count": c["n_routed_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_feed_forward_length": c["moe_shared_expert_intermediate_size"],
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_weights_scale": float(c["routed_scaling_factor"]),
    }
    own = ssm(inner, c["ssm_state_size"], c["conv_kernel"], c["mamba_num_heads"], c["n_groups"])
    found |= routed if "moe" in kinds else {}
    return common(c | {"rms_norm_eps": c["layer_norm_epsilon"]}) | own | found


def lfm2_sizes(c: Config) -> Config:
    heads = [c["num_key_value_heads"] if kind == "full_attention" else 0 for kind in c["layer_types"]]
    own = {"shortconv.l_cache": c["conv_L_cache"], "attention.head_count_kv": heads}
    if c["model_type"] == "lfm2":
        multiple = c["block_multiple_of"]
        own["feed_forward_length"] = -(-int(2 * c["intermediate_size"] / 3) // multiple) * multiple
    else:
        own |= {"leading_dense_block_count": c["num_dense_layers"], "expert_gating_func": 2}
    return common(c | {"rms_norm_eps": c["norm_eps"]}) | own


def gpt_oss_sizes(c: Config) -> Config:
    rope = c["rope_parameters"]
    return common(c | {"moe_intermediate_size": c["intermediate_size"]}) | {
        "attention.sliding_window": c["sliding_window"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }


def pure(c: Config) -> Config:
    found = {"context_length": 2**20, "embedding_length": c["hidden_size"], "block_count": c["num_hidden_layers"]}
    unused = {"feed_forward_length": 0, "attention.head_count": 0}
    return found | unused | {"attention.layer_norm_rms_epsilon": c["layer_norm_epsilon"]}


def mamba2_sizes(c: Config) -> Config:
    inner = c["num_heads"] * c["head_dim"]
    return pure(c) | ssm(inner, c["state_size"], c["conv_kernel"], c["num_heads"], c["n_groups"])


def jamba_sizes(c: Config) -> Config:
    rank = -(-c["hidden_size"] // 16) if c["mamba_dt_rank"] == "auto" else c["mamba_dt_rank"]
    own = ssm(c["mamba_expand"] * c["hidden_size"], c["mamba_d_state"], c["mamba_d_conv"], rank)
    attends = range(c["attn_layer_offset"], c["num_hidden_layers"], c["attn_layer_period"])
    heads = [c["num_key_value_heads"] if i in attends else 0 for i in range(c["num_hidden_layers"])]
    routed = {"expert_count": c["num_experts"], "expert_used_count": min(c["num_experts_per_tok"], c["num_experts"])}
    return common(c) | own | routed | {"attention.head_count_kv": heads}


def mamba_1_sizes(c: Config) -> Config:
    return pure(c) | ssm(c["intermediate_size"], c["state_size"], c["conv_kernel"], c["time_step_rank"])


def common(c: Config) -> Config:
    rope = c.get("rope_parameters") or {}
    found = {
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "block_count": c["num_hidden_layers"],
        "attention.layer_norm_rms_epsilon": float(c["rms_norm_eps"]),
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "rope.freq_base": float(rope.get("rope_theta", c.get("rope_theta", 10_000.0))),
    }
    if c.get("intermediate_size"):
        found["feed_forward_length"] = c["intermediate_size"]
    if "head_dim" in c:
        share = rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
        found |= {
            "attention.key_length": c["head_dim"],
            "attention.value_length": c["head_dim"],
            "rope.dimension_count": int(c["head_dim"] * share),
        }
    return found | experts(c)


def experts(c: Config) -> Config:
    n = c.get("num_experts", c.get("num_local_experts", 0)) if c.get("moe_intermediate_size") else 0
    if not n:
        return {}
    found = {
        "expert_count": n,
        "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
    }
    shared = c.get("shared_expert_intermediate_size")
    return found | ({"expert_shared_feed_forward_length": shared} if shared else {})


def delta_net_sizes(c: Config) -> Config:
    return common(c) | {
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"],
        "ssm.time_step_rank": c["linear_num_value_heads"],
        "ssm.inner_size": c["linear_value_head_dim"] * c["linear_num_value_heads"],
        "full_attention_interval": c["layer_types"].index("full_attention") + 1,
        **({} if c["model_type"] == "qwen3_next" else {"rope.dimension_sections": sections(c)}),
    }


def sections(c: Config) -> list[int]:
    """Rotated pairs of channels by which of three positions turns them; those of text are equal."""
    pairs = int(c["head_dim"] * c["rope_parameters"]["partial_rotary_factor"]) // 2
    third = pairs // 3
    return [pairs - 2 * third, third, third, 0]


Layer = Callable[[Config, Tensors, int], Named]
FAMILIES: dict[str, tuple[str, Callable[[Config], Config], Layer, float]] = {  # name, sizes, layers, offset of norms
    "falcon_h1": ("falcon-h1", mamba_sizes, falcon_h1, 0.0),
    "gpt_oss": ("gpt-oss", gpt_oss_sizes, gpt_oss, 0.0),
    "granitemoehybrid": ("granitehybrid", granite_sizes, granite, 0.0),
    "jamba": ("jamba", jamba_sizes, jamba, 0.0),
    "kimi_linear": ("kimi-linear", kimi_sizes, kimi, 0.0),
    "lfm2": ("lfm2", lfm2_sizes, lfm2, 0.0),
    "lfm2_moe": ("lfm2moe", lfm2_sizes, lfm2, 0.0),
    "mamba": ("mamba", mamba_1_sizes, mamba, 0.0),
    "mamba2": ("mamba2", mamba2_sizes, mamba2, 0.0),
    "nemotron_h": ("nemotron_h_moe", nemotron_sizes, nemotron, 0.0),
    "qwen3": ("qwen3", common, qwen3, 0.0),
    "qwen3_5_text": ("qwen35", delta_net_sizes, qwen_next, 1.0),
    "qwen3_5_moe_text": ("qwen35moe", delta_net_sizes, qwen_next, 1.0),
    "qwen3_moe": ("qwen3moe", common, qwen3, 0.0),
    "qwen3_next": ("qwen3next", delta_net_sizes, qwen_next, 1.0),
}


def tokens(folder: Path, vocab_size: int, pre: str) -> Config:
    """Metadata of a tokenizer of byte-level BPE."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    by_id = {i: token for token, i in tokenizer["model"]["vocab"].items()}
    by_id |= {i: token["content"] for i, token in added.items()}
    kinds = [(3 if added[i]["special"] else 4) if i in added else 1 if i in by_id else 5 for i in range(vocab_size)]
    ids = {token: i for i, token in by_id.items()}
    named = {
        f"tokenizer.ggml.{theirs}_token_id": ids[token if isinstance(token, str) else token["content"]]
        for theirs, ours in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token"))
        if (token := config.get(ours))
    }
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [by_id.get(i, f"[PAD{i}]") for i in range(vocab_size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
        **named,
    }


LAST_NORMS = (".norm.weight", "norm_f.weight", "final_layernorm.weight", "embedding_norm.weight")
LAST_NORM = dict.fromkeys(("lfm2", "lfm2moe"), "token_embd_norm.weight")


def one(weights: Tensors, *ends: str) -> Tensor:
    """The model's own tensor of one of these names, which is of no layer."""
    return next(x for name, x in weights.items() if name.endswith(ends) and not re.search(r"\.layers\.|^mtp\.", name))


def convert(
    folder: Path, file: Path, form: str = "F32", forms: Mapping[str, str] | None = None, pre: str = "qwen2"
) -> Path:
    """Write a folder's model in a format, tensors of some endings in others; tensors without products stay float32."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", [])))
    weights = {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    name, sizes, layer, offset = FAMILIES[config["model_type"]]
    if name == "nemotron_h_moe" and "moe" not in kinds_of(config):
        name = "nemotron_h"
    of_layers = {
        f"blk.{i}.{ours}": tensor
        for i in range(config["num_hidden_layers"])
        for ours, tensor in layer(config, weights, i)
    }
    metadata_of_head: Config = {}
    if "mtp.fc.weight" in weights:
        of_layers |= {f"blk.{config['num_hidden_layers']}.{ours}": x for ours, x in mtp_head(config, weights)}
        metadata_of_head = {"block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1}
    of_model = {
        "token_embd.weight": one(weights, "embed_tokens.weight", "embeddings.weight"),
        LAST_NORM.get(name, "output_norm.weight"): one(weights, *LAST_NORMS).float() + offset,
        **({} if config.get("tie_word_embeddings") else {"output.weight": weights["lm_head.weight"]}),
    }
    scales = {"token_embd.weight": config.get("embedding_multiplier", 1.0) if name == "falcon-h1" else 1.0}
    scales["output.weight"] = config.get("lm_head_multiplier", 1.0)
    found = {ours: tensor * scales.get(ours, 1.0) for ours, tensor in of_model.items()} | of_layers
    metadata = {"general.architecture": name} | {
        f"{name}.{key}": of for key, of in (sizes(config) | metadata_of_head).items()
    }
    template = folder / "chat_template.jinja"
    if template.exists():
        metadata["tokenizer.chat_template"] = template.read_text()
    metadata |= tokens(folder, config["vocab_size"], pre)

    def form_of(name: str, tensor: Tensor) -> str:
        chosen = next((other for end, other in (forms or {}).items() if name.endswith(end)), form)
        blocks = ALL_FORMATS[chosen].inputs if chosen in ALL_FORMATS else 1
        plain = not name.endswith(".weight") or any(part in name for part in ("conv1d", "norm", "ffn_gate_inp"))
        fits = tensor.ndim > 1 and not plain and tensor.shape[-1] % blocks == 0
        return chosen if fits else "F32"

    return write(file, metadata, {name: (tensor, form_of(name, tensor)) for name, tensor in found.items()})
