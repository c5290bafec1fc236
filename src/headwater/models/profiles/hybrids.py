"""Hybrids of linear attention, and of Mamba: Ring-linear 2.0 and MiniMax (Lightning), Kimi Linear and Ling 3.0 (KDA).

Those of Mamba or Mamba-2 are Jamba, Nemotron-H, Falcon-H1, Granite 4 and Bamba; Falcon Mamba and Mamba-2 have no
attention; LFM2 has short convolutions, OLMo-Hybrid and Lara-mini have Gated DeltaNet. In all others, layers of grouped
or latent attention stand between groups of recurrent ones.
"""

from __future__ import annotations

from dataclasses import replace

from headwater.layers.attention import GroupedAttention, WindowAttention
from headwater.layers.feed_forward import CLAMPED_SWIGLU, Experts, Mlp
from headwater.layers.gdn import DeltaNet
from headwater.layers.kda import DeltaAttention
from headwater.layers.lightning import Lightning
from headwater.layers.mamba import Mamba
from headwater.layers.mamba2 import Mamba2
from headwater.layers.mla import LatentAttention
from headwater.layers.short_conv import ShortConv
from headwater.models.families.quantised import ELEMENT_BYTES, MXFP4
from headwater.models.profiles.profile import FLOAT32_ASSUMED, Profile
from headwater.spec import Packed

JAMBA = Profile.of(
    "jamba-1.5-mini",
    "transformers 5.23, defaults of JambaConfig (Jamba-v0.1, whose sizes 1.5-mini keeps)",
    65_536,
    (Mamba(4096, inner=8192, state=16, conv=4, step_rank=256, normed=True), 28),
    (GroupedAttention(4096, heads=32, kv_heads=8, head_dim=128), 4),
    (Mlp(4096, 14_336), 16),
    (Experts(4096, 16, 2, 14_336), 16),
    note=FLOAT32_ASSUMED,
)
NEMOTRON_H = Profile.of(
    "nemotron-h-8b",
    "transformers 5.23, defaults of NemotronHConfig; layers of Megatron-Bridge, docs/models/llm/nemotronh.md",
    131_072,
    (Mamba2(4096, heads=128, head_dim=64, state=128, groups=8, conv=4), 24),
    (GroupedAttention(4096, heads=32, kv_heads=8, head_dim=128), 4),
    (Mlp(4096, 21_504, gated=False), 24),
)
NEMOTRON_3_NANO = Profile.of(
    "nemotron-3-nano-30b-a3b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, config.json",
    131_072,
    (Mamba2(2688, heads=64, head_dim=64, state=128, groups=8, conv=4), 23),
    (GroupedAttention(2688, heads=32, kv_heads=2, head_dim=128), 6),
    (Experts(2688, 128, 6, 1856, shared=3712, scores="sigmoid", corrected=True, gated=False), 23),
)
FALCON_H1 = Profile.of(
    "falcon-h1-7b",
    "huggingface.co/docs/transformers/model_doc/falcon_h1, table of sizes",
    130_048,
    (Mamba2(3072, heads=24, head_dim=128, state=256, groups=1, conv=4, normed=False), 44),
    (GroupedAttention(3072, heads=12, kv_heads=2, head_dim=128), 44),
    (Mlp(3072, 12_288), 44),
    note=f"the table leaves out the MLP's width, groups and vocabulary: these give its 7.59 billion parameters; "
    f"{FLOAT32_ASSUMED}",
)
GRANITE_4 = Profile.of(
    "granite-4.0-h-small",
    "ollama.com/ibm/granite4:small-h, the GGUF file's metadata",
    100_352,
    (Mamba2(4096, heads=128, head_dim=64, state=128, groups=1, conv=4), 36),
    (GroupedAttention(4096, heads=32, kv_heads=8, head_dim=128), 4),
    (Experts(4096, 72, 10, 768, shared=1536), 40),
    tied=True,
    note=FLOAT32_ASSUMED,
)
GRANITE_4_TINY = Profile.of(
    "granite-4.0-h-tiny",
    "ibm-granite/granite-4.0-h-tiny, config.json",
    100_352,
    (Mamba2(1536, heads=48, head_dim=64, state=128, groups=1, conv=4), 36),
    (GroupedAttention(1536, heads=12, kv_heads=4, head_dim=128), 4),
    (Experts(1536, 64, 6, 512, shared=1024), 40),
    tied=True,
    note=FLOAT32_ASSUMED,
)
BAMBA = Profile.of(
    "bamba-9b",
    "huggingface.co/blog/bamba, table of sizes",
    128_256,
    (Mamba2(4096, heads=128, head_dim=64, state=128, groups=1, conv=4), 29),
    (GroupedAttention(4096, heads=32, kv_heads=8, head_dim=128), 3),
    (Mlp(4096, 14_336), 32),
    note=f"the table leaves out the state's width and the vocabulary: these give its 9.78 billion parameters; "
    f"{FLOAT32_ASSUMED}",
)
FALCON_MAMBA = Profile.of(
    "falcon-mamba-7b",
    "Zuo et al., Falcon Mamba (2024): 64 layers of width 4096, states of 16",
    65_024,
    (Mamba(4096, inner=8192, state=16, conv=4, step_rank=256, normed=True, norm_weights=False), 64),
    note=FLOAT32_ASSUMED,
)
MAMBA_2 = Profile.of(
    "mamba2-2.7b",
    "Dao and Gu, Transformers are SSMs (2024), table 9: 64 layers of width 2560",
    50_288,
    (Mamba2(2560, heads=80, head_dim=64, state=128, groups=1, conv=4), 64),
    tied=True,
    note=FLOAT32_ASSUMED,
)
LFM2 = Profile.of(
    "lfm2-1.2b",
    "LiquidAI/LFM2-1.2B, config.json",
    65_536,
    (ShortConv(2048, conv=3), 10),
    (GroupedAttention(2048, heads=32, kv_heads=8, head_dim=64, normed=True), 6),
    (Mlp(2048, 8192), 16),
    tied=True,
)
LFM2_MOE = Profile.of(
    "lfm2-8b-a1b",
    "LiquidAI/LFM2-8B-A1B, config.json; transformers 5.24, defaults of Lfm2MoeConfig",
    65_536,
    (ShortConv(2048, conv=3), 18),
    (GroupedAttention(2048, heads=32, kv_heads=8, head_dim=64, normed=True), 6),
    (Mlp(2048, 7168), 2),
    (Experts(2048, 32, 4, 1792, scores="sigmoid", corrected=True), 22),
    tied=True,
)
LFM2_5_MOE = replace(
    LFM2_MOE,
    name="lfm2.5-8b-a1b",
    source="LiquidAI/LFM2.5-8B-A1B, config.json: layers of LFM2-8B-A1B",
    vocab_size=128_000,
)
GPT_OSS = GroupedAttention(2880, heads=64, kv_heads=8, head_dim=64, bias=True, out_bias=True, sinks=True)


def _gpt_oss(size: str, layers: int, experts: int) -> Profile:
    """Return a gpt-oss of a size, with half of its layers of each kind."""
    return Profile.of(
        f"gpt-oss-{size}",
        f"openai/gpt-oss-{size}, config.json",
        201_088,
        (WindowAttention.of(GPT_OSS, 128), layers // 2),
        (GPT_OSS, layers // 2),
        (Experts(2880, experts, 4, 2880, activation=CLAMPED_SWIGLU, limit=7.0, routed_bias=True), layers),
        packed=Packed(MXFP4, ELEMENT_BYTES[MXFP4], experts_only=True),
    )


RING = "{}; the hybrid of arXiv 2510.19338".format


def _ring(name: str, source: str, hidden: int, groups: int, group: int, heads: int, dense: int, routed: int) -> Profile:
    """Return a Ring-linear: groups of 5 and 8 layers give the report's 957 million and 6.1 billion parameters a token.

    The first layer's feed-forward is dense; all others have 256 experts, 8 of them a token, and a shared one.
    """
    layers = groups * group
    return Profile.of(
        name,
        source,
        157_184,
        (Lightning(hidden, heads, 128), layers - groups),
        (GroupedAttention(hidden, heads, 4, 128, normed=True), groups),
        (Mlp(hidden, dense), 1),
        (Experts(hidden, 256, 8, routed, shared=routed, scores="sigmoid", corrected=True), layers - 1),
        note=FLOAT32_ASSUMED,
    )


MINI = RING("Megatron-Bridge, BailingMoeV2Config of Ling-mini-2.0")
FLASH = RING("ollama.com/MedAIBase/Ring-flash-2.0, the GGUF file's metadata")
LATENT = LatentAttention(4096, heads=32, latent=512, nope_dim=128, rope_dim=64, v_dim=128, q_latent=1536)
LARA_ATTENTION = GroupedAttention(1024, heads=16, kv_heads=4, head_dim=128, normed=True)
LING_EXPERTS = Experts(2560, 512, 8, 768, 768, scores="sigmoid", corrected=True, groups=8, groups_per_token=4)
MODELS = (
    _ring("ring-mini-linear-2.0", MINI, 2048, groups=4, group=5, heads=16, dense=5120, routed=512),
    _ring("ring-flash-linear-2.0", FLASH, 4096, groups=4, group=8, heads=32, dense=9216, routed=1024),
    Profile.of(  # layers of MiniMax-Text-01: 456 billion parameters, 45.9 of them a token (arXiv 2506.13585)
        "minimax-m1",
        "MiniMaxAI/MiniMax-M1-80k, config.json",
        200_064,
        (Lightning(6144, 64, 128, normed=False), 70),
        (GroupedAttention(6144, 64, 8, 128), 10),
        (Experts(6144, 32, 2, 9216), 80),
        note=FLOAT32_ASSUMED,
    ),
    Profile.of(
        "kimi-linear-48b-a3b",
        "transformers 5.23, defaults of KimiLinearConfig (Kimi-Linear-48B-A3B-Instruct)",
        163_840,
        (DeltaAttention(2304, heads=32, head_dim=128, conv=4), 20),
        (LatentAttention(2304, heads=32, latent=512, nope_dim=128, rope_dim=64, v_dim=128), 7),
        (Mlp(2304, 9216), 1),
        (Experts(2304, 256, 8, 1024, shared=1024, scores="sigmoid", corrected=True), 26),
        note=FLOAT32_ASSUMED,
    ),
    Profile.of(
        "ling-2.6-flash",
        "OsaurusAI/Ling-2.6-flash-JANGTQ, README.md; experts of Ring-flash-linear-2.0",
        157_184,
        (Lightning(4096, 32, 128), 28),
        (LATENT, 4),
        (Mlp(4096, 9216), 1),
        (Experts(4096, 256, 8, 1024, shared=1024, scores="sigmoid", corrected=True), 31),
        note=f"hidden and experts' widths are not told there: these give its 104 billion parameters; {FLOAT32_ASSUMED}",
    ),
    Profile.of(
        "ling-3.0-flash",
        "transformers 5.23, defaults of BailingHybridConfig (Ling-3.0-Flash)",
        157_184,
        (DeltaAttention(2560, heads=32, head_dim=128, conv=4, low_rank=False, lowest=-5.0), 35),
        (LatentAttention(2560, heads=32, latent=512, nope_dim=128, rope_dim=64, v_dim=128, gated=True), 7),
        (Mlp(2560, 6144), 2),
        (LING_EXPERTS, 40),
        note=FLOAT32_ASSUMED,
    ),
    *(JAMBA, NEMOTRON_H, NEMOTRON_3_NANO, FALCON_H1, GRANITE_4, GRANITE_4_TINY, BAMBA, MAMBA_2, FALCON_MAMBA),
    *(LFM2, LFM2_MOE, LFM2_5_MOE),
    Profile.of(
        "olmo-hybrid-7b",
        "transformers 5.24, defaults of OlmoHybridConfig (Olmo-Hybrid-7B)",
        100_352,
        (DeltaNet(3840, 30, 30, 96, 192, conv=4, norm_eps=1e-5, apart=True, strength=2.0), 24),
        (GroupedAttention(3840, heads=30, kv_heads=30, head_dim=128, normed_whole=True), 8),
        (Mlp(3840, 11_008), 32),
        note=FLOAT32_ASSUMED,
    ),
    Profile.of(
        "lara-4-mini",
        "transformers 5.24, defaults of LaraMiniConfig (Lara-4-Mini-Base)",
        151_936,
        (DeltaNet(1024, 8, 16, 128, 128, conv=4), 14),
        (WindowAttention.of(LARA_ATTENTION, 512), 13),
        (LARA_ATTENTION, 7),
        (Experts(1024, 128, 4, 512, shared=512, float32_router=True), 34),
        tied=True,
        note=FLOAT32_ASSUMED,
    ),
    _gpt_oss("20b", layers=24, experts=32),
    _gpt_oss("120b", layers=36, experts=128),
)
