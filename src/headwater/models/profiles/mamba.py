"""Mamba-2, and hybrids of attention with Mamba or Mamba-2: Jamba, Nemotron-H, Falcon-H1, Granite 4, Bamba."""

from __future__ import annotations

from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.mamba import Mamba
from headwater.layers.mamba2 import Mamba2
from headwater.models.profiles.profile import FLOAT32_ASSUMED, Profile

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
MODELS = (JAMBA, NEMOTRON_H, FALCON_H1, GRANITE_4, BAMBA, MAMBA_2, FALCON_MAMBA)
