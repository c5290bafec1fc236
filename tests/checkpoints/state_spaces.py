"""Models with Mamba layers: Mamba, Falcon Mamba, Mamba-2, Jamba, Bamba, Granite 4, Falcon-H1 and Nemotron-H."""

import torch

from tests.checkpoints.recipe import END, Family, about_itself


def short_steps(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Steps of about a third where the projection of the step is 0."""
    weight.fill_(-1.0).add_(torch.randn(weight.shape, generator=generator), alpha=0.3)


def narrow(weight: torch.Tensor, generator: torch.Generator) -> None:
    """A product of normed rows that leaves steps about as they are."""
    weight.normal_(0.0, 0.3 * weight.shape[-1] ** -0.5, generator=generator)


def correct_in_turn(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model with corrections of its routers that choose other experts than without them."""
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)).roll(3))
    return model


STEPS = {"dt_proj.bias": short_steps, "dt_proj.weight": narrow}
SKIPS = {".D": about_itself}
# fmt: off
MAMBA = {
    "num_hidden_layers": 2, "hidden_size": 64, "state_size": 16, "conv_kernel": 4, "expand": 2,
    "time_step_rank": "auto", "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True,
    "bos_token_id": END,
}
MAMBA1 = Family("MambaConfig", "MambaForCausalLM", MAMBA, STEPS)
FALCON_MAMBA = Family("FalconMambaConfig", "FalconMambaForCausalLM", MAMBA, STEPS)
MAMBA2 = Family(
    "Mamba2Config",
    "Mamba2ForCausalLM",
    {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 16, "num_hidden_layers": 2},
    SKIPS,
)
JAMBA = Family("JambaConfig", "JambaForCausalLM", {
    "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 1, "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_dt_rank": "auto", "mamba_conv_bias": True, "mamba_proj_bias": False,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "bos_token_id": END,
}, STEPS)
BAMBA = Family("BambaConfig", "BambaForCausalLM", {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "attn_layer_indices": [1],
    "num_attention_heads": 2, "num_key_value_heads": 1, "mamba_n_heads": 4, "mamba_d_state": 16,
    "max_position_embeddings": 32768,
}, SKIPS)
GRANITE = Family("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", {
    "layer_types": ["linear_attention", "full_attention"], "hidden_size": 64, "intermediate_size": 48,
    "shared_intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 4,
    "mamba_d_state": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "embedding_multiplier": 1.5,
    "attention_multiplier": 0.3, "residual_multiplier": 0.6, "logits_scaling": 1.25,
    "max_position_embeddings": 32768,
}, SKIPS)
FALCON_H1 = Family("FalconH1Config", "FalconH1ForCausalLM", {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16,
    "max_position_embeddings": 32768,
    "mamba_chunk_size": 16,  # of the oracle, which takes ten times longer with larger ones
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
})
MULTIPLIERS = {
    "embedding_multiplier": 1.5, "lm_head_multiplier": 0.9, "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8, "key_multiplier": 0.6, "ssm_in_multiplier": 0.7, "ssm_out_multiplier": 1.1,
    "ssm_multipliers": [1.3, 0.8, 1.2, 0.9, 0.7], "mlp_multipliers": [1.4, 0.6],
}
NEMOTRON_H = Family("NemotronHConfig", "NemotronHForCausalLM", {
    "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80, "routed_scaling_factor": 2.5, "max_position_embeddings": 32768,
    "chunk_size": 16,
}, change=correct_in_turn)
WITHOUT_EXPERTS = {"num_local_experts": 0, "num_experts_per_tok": 0}

RECIPES = {
    "granite": GRANITE.recipe(**WITHOUT_EXPERTS), "granite_moe": GRANITE.recipe(),
    "granite_rope": GRANITE.recipe(position_embedding_type="rope", tie_word_embeddings=True, **WITHOUT_EXPERTS),
    "granite_moe_odd_heads": GRANITE.recipe(
        hidden_size=120, layer_types=["linear_attention", "full_attention", "linear_attention"], num_attention_heads=5,
        num_key_value_heads=1, mamba_n_heads=15, mamba_n_groups=3, mamba_conv_bias=False, mamba_proj_bias=True,
        attention_bias=True, num_local_experts=5, num_experts_per_tok=3, tie_word_embeddings=True,
    ),
    "granite_attention": GRANITE.recipe(
        layer_types=["full_attention"] * 2, position_embedding_type="rope", **WITHOUT_EXPERTS
    ),
    "bamba": BAMBA.recipe(),
    "bamba_odd_heads": BAMBA.recipe(
        hidden_size=120, num_hidden_layers=3, num_attention_heads=5, num_key_value_heads=1, mamba_n_heads=15,
        mamba_n_groups=3, mamba_conv_bias=False, mamba_proj_bias=True, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "mamba2": MAMBA2.recipe(), "mamba2_one_layer": MAMBA2.recipe(num_hidden_layers=1),
    "mamba2_odd_heads": MAMBA2.recipe(
        hidden_size=60, num_heads=5, head_dim=24, n_groups=1, state_size=24, num_hidden_layers=3, use_bias=True,
        use_conv_bias=False, tie_word_embeddings=True,
    ),
    "jamba": JAMBA.recipe(), "jamba_moe": JAMBA.recipe(num_experts=5),
    "jamba_tied_biases": JAMBA.recipe(tie_word_embeddings=True, mamba_proj_bias=True, mamba_conv_bias=False),
    "jamba_odd": JAMBA.recipe(
        num_hidden_layers=4, hidden_size=72, num_attention_heads=9, num_key_value_heads=3, mamba_d_state=11,
        mamba_d_conv=3, mamba_expand=3, mamba_dt_rank=7, num_experts=3, num_experts_per_tok=3, shard_bytes=300_000,
    ),
    "mamba": MAMBA1.recipe(),
    "falcon_mamba": FALCON_MAMBA.recipe(
        hidden_size=72, state_size=11, conv_kernel=3, expand=3, time_step_rank=7, use_bias=True, use_conv_bias=False,
        tie_word_embeddings=False,
    ),
    "falcon_h1": FALCON_H1.recipe(**MULTIPLIERS, mamba_d_ssm=96, mamba_n_heads=3, mamba_n_groups=1),
    "falcon_h1_biases": FALCON_H1.recipe(
        **MULTIPLIERS,
        mamba_rms_norm=True, mamba_norm_before_gate=False, attention_bias=True, mlp_bias=True, projectors_bias=True,
        mamba_proj_bias=True, time_step_limit=(0.5, 1.5),
    ),
    "falcon_h1_odd_heads": FALCON_H1.recipe(
        mamba_rms_norm=True, mamba_norm_before_gate=True, tie_word_embeddings=True, num_attention_heads=5,
        num_key_value_heads=1, hidden_size=120, mamba_d_ssm=240, mamba_n_heads=6, mamba_n_groups=3,
        mamba_conv_bias=False, mamba_d_state=24, num_hidden_layers=3,
    ),
    "nemotron_h": NEMOTRON_H.recipe(hybrid_override_pattern="M-*E"),
    "nemotron_h_latent": NEMOTRON_H.recipe(
        hybrid_override_pattern="M*-MEM", moe_latent_size=48, n_group=4, topk_group=2, norm_topk_prob=False,
        mlp_bias=True, use_bias=True,
    ),
    "nemotron_h_odd_heads": NEMOTRON_H.recipe(
        hybrid_override_pattern="M-M*-", hidden_size=72, num_attention_heads=3, num_key_value_heads=1,
        mamba_num_heads=5, mamba_head_dim=24, n_groups=1, ssm_state_size=40, use_conv_bias=False,
        time_step_limit=(0.5, float("inf")),
        time_step_min=0.5,  # what transformers takes for the limit
    ),
}
