"""transformers' default configurations, which are those of published models: as many weights as it makes of them."""

import pytest
import torch

from headwater.models.families import FAMILIES, read_config

MODELS = {  # family -> configuration and model in transformers
    "Qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "Qwen3-Next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "Granite 4": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    "Bamba": ("BambaConfig", "BambaForCausalLM"),
    "Falcon-H1": ("FalconH1Config", "FalconH1ForCausalLM"),
    "Nemotron-H": ("NemotronHConfig", "NemotronHForCausalLM"),
    "Mamba-2": ("Mamba2Config", "Mamba2ForCausalLM"),
    "MiniMax": ("MiniMaxConfig", "MiniMaxForCausalLM"),
    "Kimi-Linear": ("KimiLinearConfig", "KimiLinearForCausalLM"),
    "Ling 3.0": ("BailingHybridConfig", "BailingHybridForCausalLM"),
    "Jamba": ("JambaConfig", "JambaForCausalLM"),
    "Mamba": ("MambaConfig", "MambaForCausalLM"),
    "LFM2": ("Lfm2Config", "Lfm2ForCausalLM"),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM"),
    "OLMo-Hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM"),
    "Lara-mini": ("LaraMiniConfig", "LaraMiniForCausalLM"),
}
ELSEWHERE = {"Ling 2.5", "Ring-linear"}  # not in transformers


def kept(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the model's tensors that a checkpoint has: parameters, and the buffers with corrections of routers."""
    buffers = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return [*model.parameters(), *buffers]


def test_every_family_is_measured() -> None:
    assert {family.name for family in FAMILIES} == set(MODELS) | ELSEWHERE


@pytest.mark.parametrize("family", MODELS)
def test_a_model_of_the_default_configuration_has_as_many_weights(family: str) -> None:
    import transformers

    config_of, model_of = (getattr(transformers, name) for name in MODELS[family])
    config = config_of()
    with torch.device("meta"):
        wanted = sum(tensor.numel() for tensor in kept(model_of(config)))
    assert sum(read_config(config.to_dict(), "bfloat16").parameters_by_kind().values()) == wanted
