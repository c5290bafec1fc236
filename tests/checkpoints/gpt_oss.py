"""gpt-oss: sinks, windows in turn with full attention, experts with biases and a clamped gate."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.recipe import Family

# fmt: off
FULL, SLIDING = "full_attention", "sliding_attention"
FILL = {
    "sinks": lambda weight, generator: weight.normal_(1.0, 1.0, generator=generator),
    "gate_up_proj": lambda weight, generator: weight.normal_(0.0, 0.5, generator=generator),
}
GPT_OSS = Family("GptOssConfig", "GptOssForCausalLM", {
    "layer_types": [SLIDING, FULL], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128, "sliding_window": 100,
    "max_position_embeddings": 32768, "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 1024, "rope_theta": 1.5e5,
        "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0,
    },
}, FILL)
WHOLE_RAMP = {  # of YaRN, over all pairs: its bounds are whole numbers, to which llama.cpp rounds others
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 128, "rope_theta": 4.0, "truncate": False,
}
# fmt: on
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LARGEST_EXPONENT, BIAS = 2, 127
BLOCK = 32  # inputs


def blocks_and_scales(weight_EKN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts' weights in MXFP4: the nearest numbers, with a power of two by the largest of a block."""
    block_ENXg = weight_EKN.float().transpose(1, 2).unflatten(2, (-1, BLOCK))
    exponent_ENX = block_ENXg.abs().amax(-1).log2().floor() - LARGEST_EXPONENT
    scaled = block_ENXg / exponent_ENX.exp2()[..., None]
    code = ((scaled.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (scaled < 0)).to(torch.uint8)
    return (code[..., 0::2] | code[..., 1::2] << 4), (exponent_ENX + BIAS).to(torch.uint8)


def in_mxfp4(folder: Path) -> None:
    """Write a checkpoint's experts as gpt-oss is published: in MXFP4, other weights in bfloat16."""
    config, stored = folder / "config.json", load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks_and_scales(stored.pop(name))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    unconverted = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    method = {"quant_method": "mxfp4", "modules_to_not_convert": unconverted}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": method}))


RECIPES = {
    "gpt_oss": GPT_OSS.recipe(),
    "gpt_oss_mxfp4": replace(GPT_OSS.recipe(dtype="bfloat16"), rewrite=in_mxfp4),
    "gpt_oss_whole_ramp": GPT_OSS.recipe(rope_parameters=WHOLE_RAMP),
    "gpt_oss_odd": GPT_OSS.recipe(
        layer_types=[FULL, SLIDING, SLIDING],
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=24,
        num_local_experts=5,
        num_experts_per_tok=3,
        intermediate_size=40,
        sliding_window=65,
        attention_bias=False,
        tie_word_embeddings=True,
        shard_bytes=300_000,
    ),
}
