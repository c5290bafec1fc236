"""Qwen3.5, Qwen3-Next, and Qwen3: full attention, windows, experts."""

from tests.checkpoints.recipe import Family

# fmt: off
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
ATTENTION = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 32768,
}
MIXERS = ATTENTION | {
    "layer_types": [LINEAR, FULL], "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MLP, SHARED = {"intermediate_size": 160}, {"shared_expert_intermediate_size": 80}
DENSE = Family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", MIXERS | MLP)
MOE = Family("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", MIXERS | EXPERTS | SHARED)
NEXT = Family("Qwen3NextConfig", "Qwen3NextForCausalLM", MIXERS | MLP | EXPERTS | SHARED)

QWEN3 = ATTENTION | MLP | {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
WINDOW = {"use_sliding_window": True, "sliding_window": 100}
PLAIN = Family("Qwen3Config", "Qwen3ForCausalLM", QWEN3)
WINDOWED = Family("Qwen3Config", "Qwen3ForCausalLM", QWEN3 | WINDOW)
ROUTED = Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN3 | EXPERTS | {"norm_topk_prob": True})

RECIPES = {
    "qwen3_5": DENSE.recipe(), "qwen3_5_moe": MOE.recipe(), "qwen3_next": NEXT.recipe(),
    "qwen3_5_tied": DENSE.recipe(tie_word_embeddings=True),
    "qwen3_5_odd_heads": DENSE.recipe(
        num_attention_heads=6, num_key_value_heads=2, head_dim=24, linear_num_key_heads=3, linear_num_value_heads=3,
        linear_key_head_dim=24, linear_value_head_dim=40,
    ),
    "qwen3_next_odd_heads": NEXT.recipe(
        num_attention_heads=5, num_key_value_heads=1, linear_num_key_heads=3, linear_num_value_heads=9
    ),
    "qwen3_5_sharded": DENSE.recipe(layer_types=[LINEAR, FULL] * 2, shard_bytes=300_000),
    "qwen3_5_moe_sharded": MOE.recipe(layer_types=[LINEAR, FULL] * 2, shard_bytes=300_000),
    "qwen3_5_bfloat16": DENSE.recipe(dtype="bfloat16"),
    "qwen3_5_yarn": DENSE.recipe(  # a ramp within 4 of 8 pairs, and prompts longer than the training
        rope_parameters={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    ),
    "qwen3_longrope": PLAIN.recipe(
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 16, "long_factor": [1 + i / 3 for i in range(16)],
        },
    ),
    "qwen3_window_llama3": WINDOWED.recipe(
        layer_types=[SLIDING, FULL],
        rope_parameters={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
            "original_max_position_embeddings": 128,
        },
    ),
    "qwen3_5_wide": DENSE.recipe(
        hidden_size=1024, intermediate_size=1536, num_attention_heads=8, head_dim=64, linear_num_key_heads=4,
        linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "qwen3_5_blocks": DENSE.recipe(  # inputs in blocks of 256, and heads that are shorter than a block
        hidden_size=256, intermediate_size=256, head_dim=64, linear_num_value_heads=8, linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
    "qwen3_5_bench": DENSE.recipe(
        layer_types=[*[LINEAR] * 3, FULL] * 2, hidden_size=512, intermediate_size=1536, head_dim=128,
        linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=128, linear_value_head_dim=128,
    ),
    "qwen3": PLAIN.recipe(), "qwen3_window": WINDOWED.recipe(layer_types=[SLIDING, FULL]),
    "qwen3_windows_only": WINDOWED.recipe(layer_types=[SLIDING] * 2, tie_word_embeddings=True, sliding_window=192),
    "qwen3_window_odd_heads": WINDOWED.recipe(
        layer_types=[FULL, SLIDING, SLIDING], hidden_size=72, num_attention_heads=5, num_key_value_heads=1,
        head_dim=24, attention_bias=True, sliding_window=37,
    ),
    "qwen3_moe": ROUTED.recipe(),
    "qwen3_moe_window": ROUTED.recipe(mlp_only_layers=[0], norm_topk_prob=False, **WINDOW),
}
