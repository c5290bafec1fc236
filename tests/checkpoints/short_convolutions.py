"""Models with gated short convolutions: LFM2, dense and with experts."""

from tests.checkpoints.recipe import END, Family
from tests.checkpoints.state_spaces import correct_in_turn

# fmt: off
SIZES = {
    "layer_types": ["conv", "full_attention"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "bos_token_id": END,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
TAPS = {"conv.conv.weight": lambda weight, generator: weight.normal_(0.0, 0.5, generator=generator)}
LFM2 = Family("Lfm2Config", "Lfm2ForCausalLM", SIZES | {"intermediate_size": 160, "block_multiple_of": 32}, TAPS)
LFM2_MOE = Family("Lfm2MoeConfig", "Lfm2MoeForCausalLM", SIZES | {
    "intermediate_size": 160, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2,
    "num_dense_layers": 1, "layer_types": ["full_attention", "conv"],
}, TAPS, change=correct_in_turn)

RECIPES = {
    "lfm2": LFM2.recipe(), "lfm2_moe": LFM2_MOE.recipe(),
    "lfm2_odd_heads": LFM2.recipe(
        layer_types=["conv", "conv", "full_attention"], hidden_size=72, num_attention_heads=9, num_key_value_heads=3,
        conv_bias=True, conv_L_cache=4, block_ffn_dim_multiplier=1.3, tie_word_embeddings=False, shard_bytes=300_000,
    ),
    "lfm2_moe_odd": LFM2_MOE.recipe(
        layer_types=["full_attention", "conv", "conv"], num_experts=5, num_experts_per_tok=3, num_dense_layers=0,
        conv_bias=True, conv_L_cache=2, norm_topk_prob=False, routed_scaling_factor=1.5, use_expert_bias=False,
    ),
}
