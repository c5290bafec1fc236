"""Nemotron-H, Nemotron-Nano v2 and Nemotron 3: each layer is one of Mamba-2, attention, MLP and experts.

Attention has no positions; MLPs and experts have no gate, and a squared ReLU. Steps of Mamba-2 are kept within
`time_step_limit`, as other families' are; transformers 5.23 uses `time_step_min`, and only in prefills.
"""

from __future__ import annotations

from headwater.config_keys import ConfigKeys
from headwater.errors import CheckpointError
from headwater.layers.architecture import Architecture, Block, Part
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.layer import Layer
from headwater.layers.mamba2 import Mamba2
from headwater.models.families import reading
from headwater.models.families.bamba import read_heads
from headwater.models.families.family import FULL, LINEAR, Family, Refusal, only
from headwater.models.families.mamba2 import read_mixer

MLP, EXPERTS = "mlp", "moe"
SIGNS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}  # of hybrid_override_pattern
KINDS = {kind: kind for kind in SIGNS.values()} | {"mamba": LINEAR, "attention": FULL}
NAMES = (  # of experts
    ("correction", "gate.e_score_correction_bias"),
    ("shared_expert", "shared_experts"),
    ("latent_in", "fc1_latent_proj"),
    ("latent_out", "fc2_latent_proj"),
)
ACTIVATION = "relu2"


def read_nemotron_h(keys: ConfigKeys) -> Architecture:
    readers = {LINEAR: _read_mamba, FULL: _read_attention, MLP: _read_mlp, EXPERTS: _read_experts}
    types, of_mtp = _read_types(keys), _read_mtp_types(keys)
    layers: dict[str, Layer] = {kind: readers[kind](keys) for kind in dict.fromkeys((*types, *of_mtp))}

    def blocks(kinds: list[str], within: str = "") -> list[Block]:
        names = ((f"{within}layers.{i}", kind) for i, kind in enumerate(kinds))
        return [
            Block(f"{at}.norm.weight", (Part(layers[kind], f"{at}.mixer", NAMES if kind == EXPERTS else ()),))
            for at, kind in names
        ]

    first, last = "mtp.layers.0", f"mtp.layers.{len(of_mtp) - 1}"
    return reading.architecture(
        keys,
        blocks(types),
        4096,
        keys.number("layer_norm_epsilon", 1e-5),
        embedding="embeddings.weight",
        final_norm="norm_f.weight",
        prefixes=("backbone.", "model."),
        float32_residual=keys.flag("residual_in_fp32", False),
        mtp=reading.mtp_head(first, blocks(of_mtp, "mtp."), last) if of_mtp else None,
    )


def _read_mtp_types(keys: ConfigKeys) -> list[str]:
    """Return the kinds of the layers of the MTP head, which begins with attention; none without a head."""
    kinds = [SIGNS.get(sign, sign) for sign in keys.optional("mtp_hybrid_override_pattern") or ""]
    kinds = kinds or [KINDS.get(kind, kind) for kind in keys.optional("mtp_layers_block_type") or ()]
    reading.check_types(kinds, KINDS)
    known = keys.optional("n_routed_experts") is not None or EXPERTS not in kinds
    return kinds if known and kinds[:1] == [FULL] and LINEAR not in kinds else []


def _read_types(keys: ConfigKeys) -> list[str]:
    """Return the kind of each layer, from a list of names or a pattern with one character for each."""
    key, known = "hybrid_override_pattern", SIGNS
    for other in ("layers_block_type", "layer_types"):
        if keys.optional(other) is not None:
            key, known = other, KINDS
    names = list(keys.text(key)) if known is SIGNS else keys.listed(key, [])
    reading.check_types(names, known)
    count = keys.integer("num_hidden_layers", len(names))
    if count != len(names) or not 0 < count <= reading.MAX_LAYERS:
        raise CheckpointError(f"config.json: key {key!r} has {len(names)} entries for {count} layers")
    return [known[name] for name in names]


def _read_mamba(keys: ConfigKeys) -> Mamba2:
    keys.require("mamba_hidden_act", "silu", default="silu")
    keys.require("mamba_proj_bias", False, default=False)
    heads, head_dim = keys.positive("mamba_num_heads", 128), keys.positive("mamba_head_dim", 64)
    return read_mixer(keys, heads, head_dim, state=keys.positive("ssm_state_size", 128))


def _read_attention(keys: ConfigKeys) -> GroupedAttention:
    """Read attention without positions: the Mamba layers provide the order of tokens."""
    keys.require("attention_bias", False, default=False)
    heads, kv_heads, _ = read_heads(keys)
    head_dim = keys.positive("head_dim", keys.positive("attention_head_dim", 128))
    return GroupedAttention(keys.positive("hidden_size"), heads, kv_heads, head_dim)


def _read_mlp(keys: ConfigKeys) -> Mlp:
    keys.require("mlp_hidden_act", ACTIVATION, default=ACTIVATION)
    hidden, intermediate = keys.positive("hidden_size"), keys.positive("intermediate_size")
    return Mlp(hidden, intermediate, gated=False, activation=ACTIVATION, bias=keys.flag("mlp_bias", False))


def _read_experts(keys: ConfigKeys) -> Experts:
    keys.require("mlp_hidden_act", ACTIVATION, default=ACTIVATION)
    keys.require("n_shared_experts", 1, default=1)
    experts, per_token = keys.positive("n_routed_experts"), keys.positive("num_experts_per_tok")
    groups, best = keys.positive("n_group", 1), keys.positive("topk_group", 1)
    if experts % groups or not best <= groups or per_token > experts // groups * best:
        raise CheckpointError(
            f"config.json: {per_token} experts a token from {best} of {groups} groups of {experts} experts"
        )
    return Experts(
        keys.positive("hidden_size"),
        experts,
        per_token,
        keys.positive("moe_intermediate_size"),
        shared=keys.positive("moe_shared_expert_intermediate_size"),
        normalise=keys.flag("norm_topk_prob", True),
        scores="sigmoid",
        corrected=True,
        groups=groups,
        groups_per_token=best,
        scale=keys.number("routed_scaling_factor", 1.0),
        gated=False,
        activation=ACTIVATION,
        latent=keys.integer("moe_latent_size", 0),
        bias=keys.flag("mlp_bias", False),
    )


FAMILY = Family(
    "Nemotron-H",
    ("nemotron_h",),
    read_nemotron_h,
    architectures=("NemotronHForCausalLM",),
    profile="nemotron-h-8b",
    refuses=(
        only("other activations", "mlp_hidden_act", "silu", ACTIVATION, always=False),
        only("other activations", "mamba_hidden_act", "relu", "silu", always=False),
        only("biases of attention", "attention_bias", True, False, always=False),
        only("attention to a window", "sliding_window", 4096, None),
        only("biases only of Mamba's projections", "mamba_proj_bias", True, False, always=False),
        Refusal(
            "layers of another kind",
            {"layers_block_type": ["linear_attention", "sliding_attention"]},
            "layer type 'sliding_attention' is not one of ['attention', 'full_attention', ",
        ),
    ),
)
