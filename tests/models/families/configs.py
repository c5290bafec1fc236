"""Configurations as they are published, or the parts of them that decide the maths."""

from typing import Any

Config = dict[str, Any]
# fmt: off
KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI: Config = {
    "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
    "hidden_act": "silu", "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "mla_use_nope": True, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
    "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True,
    "routed_scaling_factor": 2.446, "first_k_dense_replace": 1,
    "linear_attn_config": {
        "full_attn_layers": KIMI_FULL, "kda_layers": [i for i in range(1, 28) if i not in KIMI_FULL], "head_dim": 128,
        "num_heads": 32, "short_conv_kernel_size": 4,
    },
    "model_max_length": 1048576, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LING: Config = {
    "model_type": "bailing_hybrid", "vocab_size": 157184, "hidden_size": 2560, "intermediate_size": 6144,
    "num_hidden_layers": 42, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_theta": 6000000, "rope_interleave": True, "partial_rotary_factor": 0.5, "use_mla_nope": False,
    "gated_attention_proj_granularity_type": "head_wise", "layer_group_size": 6, "no_kda_lora": True,
    "kda_safe_gate": True, "kda_lower_bound": -5.0, "short_conv_kernel_size": 4, "num_experts": 512,
    "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 768,
    "moe_shared_expert_intermediate_size": 768, "first_k_dense_replace": 2, "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True, "n_group": 8, "topk_group": 4, "score_function": "sigmoid", "routed_scaling_factor": 2.5,
    "max_position_embeddings": 262144, "num_nextn_predict_layers": 1,
}
MINIMAX_M1: Config = {
    "model_type": "minimax_m1", "attn_type_list": ([0] * 7 + [1]) * 10, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 6144, "intermediate_size": 9216, "layernorm_full_attention_alpha": 3.5565588200778455,
    "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_alpha": 3.5565588200778455,
    "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_alpha": 3.5565588200778455, "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 10240000, "num_attention_heads": 64, "num_experts_per_tok": 2, "num_hidden_layers": 80,
    "num_key_value_heads": 8, "num_local_experts": 32, "postnorm": True, "rms_norm_eps": 1e-05, "rope_theta": 10000000,
    "rotary_dim": 64, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None,
    "tie_word_embeddings": False, "vocab_size": 200064,
}
RING_MINI: Config = {
    "model_type": "bailing_moe_linear", "first_k_dense_replace": 1, "group_norm_size": 4, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120, "layer_group_size": 5, "linear_silu": False,
    "max_position_embeddings": 131072, "moe_intermediate_size": 512, "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 512, "n_group": 8, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 20, "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0, "num_shared_experts": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5, "router_dtype": "fp32",
    "score_function": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "use_bias": False, "use_qk_norm": True,
    "use_qkv_bias": False, "vocab_size": 157184,
}
JAMBA: Config = {  # the maths of Jamba-v0.1's
    "model_type": "jamba", "vocab_size": 65_536, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 16,
    "num_experts_per_tok": 2, "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1,
    "expert_layer_period": 2, "mamba_inner_layernorms": True, "sliding_window": None, "mamba_dt_rank": 256,
}
MAMBA: Config = {
    "model_type": "mamba", "vocab_size": 50_280, "hidden_size": 760, "state_size": 16, "num_hidden_layers": 24,
}
FALCON_H1: Config = {
    "model_type": "falcon_h1", "vocab_size": 32_784, "hidden_size": 1024, "num_hidden_layers": 36,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 2048, "mamba_d_ssm": 1536,
    "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
    "mamba_norm_before_gate": False, "mamba_rms_norm": False, "rope_theta": 1e11, "rope_scaling": None,
    "attn_layer_indices": None, "embedding_multiplier": 5.5, "lm_head_multiplier": 0.04, "key_multiplier": 0.4,
    "attention_in_multiplier": 1.1, "attention_out_multiplier": 0.94, "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.24, "ssm_multipliers": [0.35, 0.25, 0.36, 0.5, 0.37], "mlp_multipliers": [0.88, 0.59],
}
LFM2: Config = {
    "model_type": "lfm2", "vocab_size": 65_536, "hidden_size": 2048, "num_hidden_layers": 16, "block_ff_dim": 12_288,
    "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "norm_eps": 1e-05,
    "block_use_swiglu": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_attention_heads": 32, "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0, "use_pos_enc": True, "max_position_embeddings": 128_000,
}
LFM2_MOE: Config = {
    "model_type": "lfm2_moe", "vocab_size": 65_536, "hidden_size": 2048, "intermediate_size": 7168, "conv_L_cache": 3,
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    "num_hidden_layers": 24, "moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts": 32,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 1_000_000.0, "norm_eps": 1e-05,
}
GPT_OSS: Config = {
    "model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "attention_bias": True, "num_local_experts": 32,
    "num_experts_per_tok": 4, "experts_per_token": 4, "intermediate_size": 2880, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131_072,
    "initial_context_length": 4096, "rms_norm_eps": 1e-05, "rope_theta": 150_000, "swiglu_limit": 7.0,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "hidden_act": "silu", "tie_word_embeddings": False, "quantization_config": {"quant_method": "mxfp4"},
}
GPT_OSS_120B: Config = GPT_OSS | {
    "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
}
NEMOTRON_H: Config = {
    "model_type": "nemotron_h", "vocab_size": 131_072, "hidden_size": 4096, "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "attention_head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 21_504, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "time_step_limit": [0.0, float("inf")],
}
NEMOTRON_NANO: Config = NEMOTRON_H | {
    "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "head_dim": 128, "num_key_value_heads": 2, "mamba_num_heads": 64, "n_routed_experts": 128,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
}
