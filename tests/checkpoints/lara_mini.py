"""Lara-mini: Gated DeltaNet, attention over a window, and attention without positions, with experts in all layers."""

from tests.checkpoints.recipe import Family

LINEAR, SLIDING, FULL = "linear_attention", "sliding_attention", "full_attention"
LARA_MINI = Family(
    "LaraMiniConfig",
    "LaraMiniForCausalLM",
    {
        "layer_types": [LINEAR, SLIDING, FULL],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 100,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
)
RECIPES = {
    "lara_mini": LARA_MINI.recipe(),
    "lara_mini_odd": LARA_MINI.recipe(
        layer_types=[SLIDING, FULL, LINEAR, LINEAR],
        hidden_size=72,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=24,
        sliding_window=65,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=24,
        linear_value_head_dim=40,
        linear_conv_kernel_dim=3,
        num_experts=5,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
        shard_bytes=300_000,
    ),
}
