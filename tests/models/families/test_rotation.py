"""Scalings of rotations, as configurations, GGUF files and `--rope-scaling` describe them, against transformers."""

import json
import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headwater.config_keys import ConfigKeys
from headwater.engine.proof.verdict import key_of
from headwater.errors import CheckpointError
from headwater.layers.attention import GroupedAttention, Rotary
from headwater.layers.rotary_scaling import Divided, Linear, Yarn
from headwater.mixers.frequencies import frequencies
from headwater.mixers.rotary import RotaryTable
from headwater.models.families import read_config
from headwater.models.families.rotation import TRAINED, read_rotary
from headwater.setting import SettingError
from headwater.spec import ModelSpec

PAIRS = 32  # of a head with 128 channels, of which half rotate
DIVISORS = {"short_factor": [1 + i / 40 for i in range(PAIRS)], "long_factor": [1.5 * 1.07**i for i in range(PAIRS)]}
LATENT = {"mscale": 0.8, "mscale_all_dim": 1.2}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "llama3 of a short training": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn, other ramp": {"rope_type": "yarn", "factor": 7.0, "beta_fast": 48.0, "beta_slow": 2.0, "truncate": False},
    "yarn, own attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
    "yarn, two scales": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, **LATENT},
    "yarn without a factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8192},
    "longrope, short": {"rope_type": "longrope", **DIVISORS},
    "longrope, attention": {"rope_type": "longrope", "attention_factor": 1.19, **DIVISORS},
    "longrope, long": {"rope_type": "longrope", "original_max_position_embeddings": 4096, **DIVISORS},
    "proportional": {"rope_type": "proportional"},
    "proportional, slower": {"rope_type": "proportional", "factor": 8.0},
}  # fmt: skip
BASE = {"rope_theta": 1e6, "partial_rotary_factor": 0.5}
MODEL = {"max_position_embeddings": 32768, "head_dim": 128, "hidden_size": 256, "num_attention_heads": 2}


def expected(scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Frequencies and attention factor of transformers."""
    trained = {} if scaling["rope_type"] in ("linear", "proportional") else {TRAINED: MODEL["max_position_embeddings"]}
    config = PreTrainedConfig(**MODEL, rope_parameters=BASE | trained | scaling)
    is_long = scaling.get("original_max_position_embeddings", 10**6) < MODEL["max_position_embeddings"]
    found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
        config, None, seq_len=10**5 if is_long else None
    )
    return found


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type", "by type of layer"])
def test_frequencies_and_attention_factor_equal_those_of_transformers(name: str, spelling: str) -> None:
    scaling = dict(SCALINGS[name])
    written: dict[str, dict[str, Any]] = {
        "rope_parameters": {"rope_parameters": BASE | scaling},
        "rope_scaling": BASE | {"rope_scaling": scaling},
        "type": BASE | {"rope_scaling": {"type" if key == "rope_type" else key: x for key, x in scaling.items()}},
        "by type of layer": {"rope_parameters": {"full_attention": BASE | scaling, "sliding_attention": BASE}},
    }
    rotary = read_rotary(ConfigKeys(MODEL | written[spelling]), 128)
    frequency_F, amplitude = expected(scaling)
    assert torch.equal(frequencies(rotary), frequency_F)
    assert rotary.amplitude == amplitude
    table = RotaryTable(rotary, "cpu").at(torch.tensor([0, 5000]))
    assert torch.equal(table[1, 0], (5000 * frequency_F).cos() * amplitude)
    if spelling == "by type of layer":
        plain = read_rotary(ConfigKeys(MODEL | written[spelling]), 128, layer_type="sliding_attention")
        assert (plain.scaling, plain.amplitude, plain.dim) == (None, 1.0, 64)


QWEN: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 64, "max_position_embeddings": 262_144, "rope_theta": 1e7,
}  # fmt: skip


def spec_with(flag: str | None, **config: Any) -> ModelSpec:
    return read_config(QWEN | config, "float32", rope_scaling=flag)


def rotary_with(flag: str | None, **config: Any) -> Rotary:
    layer = spec_with(flag, **config).layers[0]
    assert isinstance(layer, GroupedAttention)
    assert layer.rotary is not None
    return layer.rotary


def test_flag_has_the_recipe_of_a_million_tokens() -> None:
    """As Qwen publishes it, in short and as JSON, for a configuration with other keys of its rotation."""
    recipe = '{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}'
    own = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}}
    wanted = Rotary(32, 1e7, scaling=Yarn(4.0, 262_144), amplitude=0.1 * math.log(4) + 1)
    assert rotary_with("yarn:4", **own) == rotary_with(recipe, **own) == wanted
    assert (spec_with("yarn:4").max_length, spec_with(None).max_length) == (1_048_576, 262_144)
    assert rotary_with("linear:2").scaling == Linear(2.0)
    assert spec_with("linear:2").max_length == 524_288


def test_flag_is_part_of_the_proof_and_of_the_fingerprint() -> None:
    """Angles change bits: neither a verdict nor a stored page is one of the other scaling."""
    assert len({json.dumps(key_of(spec_with(flag))) for flag in (None, "yarn:4", "yarn:8", "linear:4")}) == 4


def test_flag_replaces_the_scaling_of_the_model() -> None:
    own = {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 7.0}, "max_position_embeddings": 4096}
    assert rotary_with("yarn:8", **own).amplitude == 0.1 * math.log(8) + 1
    assert rotary_with('{"factor": 8.0}', **own) == Rotary(128, 1e7, scaling=Yarn(8.0, 4096), amplitude=7.0)
    assert rotary_with("default", **own).scaling is None


def test_longrope_is_chosen_by_the_configured_length() -> None:
    """Once for all sequences: `max_position_embeddings` decides, which the flag can change."""
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 4096}
    own = {"rope_scaling": {"type": "su", **factors}}
    assert rotary_with(None, **own).scaling == Divided((2.0,) * 64)
    assert rotary_with('{"max_position_embeddings": 4096}', **own).scaling == Divided((1.0,) * 64)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"type": "dynamic", "factor": 2.0}, "no prefix is reusable: use --rope-scaling yarn:FACTOR"),
        ({"type": "other"}, "'rope_type' is 'other', must be one of default, linear, llama3, longrope"),
        ({"type": "yarn"}, "key 'factor' is missing"),
        ({"type": "linear", "factor": -1.0}, "'factor' is -1.0, must be more than 0"),
        ({"type": "longrope", "short_factor": [1.0]}, r"'short_factor' is \[1.0\], must be 64 numbers above 0"),
        ({"sliding_attention": {"factor": 2.0}}, "must be an object, or have one for layers of type 'full_attention'"),
        (7, "'rope_scaling' is 7, must be an object"),
    ],
)
def test_rotation_that_is_not_computed_is_refused_by_name(keys: Any, error: str) -> None:
    with pytest.raises(CheckpointError, match=error):
        spec_with(None, rope_scaling=keys)


@pytest.mark.parametrize("text", ["yarn:x", "[1]", "{", '{"factor"}'])
def test_flag_without_kind_and_factor_is_refused(text: str) -> None:
    with pytest.raises((SettingError, CheckpointError), match="must be"):
        spec_with(text)


def test_flag_for_a_model_without_positions_is_refused() -> None:
    mamba = {"model_type": "mamba", "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 16}
    with pytest.raises(SettingError, match="rope_scaling is 'yarn:4', but no layer of a Mamba model rotates"):
        read_config(mamba, "float32", rope_scaling="yarn:4")
