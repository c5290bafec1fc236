"""Qwen's hybrids, three layers of Gated DeltaNet to one of gated attention (Qwen3.5, Qwen3-Next), and a Qwen3."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.gdn import DeltaNet
from headwater.layers.layer import Layer
from headwater.models.profiles.profile import FLOAT32_ASSUMED, Profile

VOCABULARY = 248_320  # of Qwen3.5
GROUP = 4  # layers, of which the last has attention


@dataclass(frozen=True, slots=True)
class Qwen:
    """Differences between the family's configurations; attention heads have 256 channels, DeltaNet heads 128."""

    name: str
    source: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    v_heads: int
    feed_forward: Layer
    vocabulary: int = VOCABULARY
    tied: bool = False
    note: str = ""

    def profile(self) -> Profile:
        delta_net = DeltaNet(self.hidden, k_heads=16, v_heads=self.v_heads, k_dim=128, v_dim=128, conv=4)
        attention = GroupedAttention(self.hidden, self.heads, self.kv_heads, 256, gated=True, normed=True)
        n_attention = self.layers // GROUP
        return Profile(
            name=self.name,
            source=self.source,
            hidden_size=self.hidden,
            vocab_size=self.vocabulary,
            layers=(
                (delta_net, self.layers - n_attention),
                (attention, n_attention),
                (self.feed_forward, self.layers),
            ),
            tied=self.tied,
            note=self.note,
        )


def _experts(hidden: int, experts: int, per_token: int, intermediate: int) -> Experts:
    return Experts(hidden, experts, per_token, intermediate, shared=intermediate, shared_gate=True)


DEFAULTS = "transformers 5.23, defaults of {}".format
NEXT = Qwen(
    "qwen3-next-80b-a3b", DEFAULTS("Qwen3NextConfig"), 2048, 48, heads=16, kv_heads=2, v_heads=32,
    feed_forward=_experts(2048, 512, 10, 512), vocabulary=151_936, note=FLOAT32_ASSUMED,
).profile()  # fmt: skip
MODELS = (
    Qwen(
        "qwen3.5-0.8b", "github.com/THUDM/slime, scripts/models/qwen3.5-0.8B.sh", 1024, 24,
        heads=8, kv_heads=2, v_heads=16, feed_forward=Mlp(1024, 3584), tied=True,
        note="DeltaNet's heads are those of huggingface.co/oopere/Qwen3.5-0.65B-Base-Rearchitected, made from it",
    ).profile(),
    Qwen(
        "qwen3.5-9b", DEFAULTS("Qwen3_5TextConfig"), 4096, 32,
        heads=16, kv_heads=4, v_heads=32, feed_forward=Mlp(4096, 12288),
    ).profile(),
    Qwen(
        "qwen3.5-35b-a3b", DEFAULTS("Qwen3_5MoeTextConfig"), 2048, 40,
        heads=16, kv_heads=2, v_heads=32, feed_forward=_experts(2048, 256, 8, 512),
    ).profile(),
    Qwen(
        "qwen3.5-122b-a10b", "docs.vultr.com/models/alibaba-qwen-35/qwen3.5-122b-a10b", 3072, 48,
        heads=32, kv_heads=2, v_heads=64, feed_forward=_experts(3072, 256, 8, 1024),
        note="heads of KV and DeltaNet, and experts' widths, are not told there: these give its 122.11 B parameters",
    ).profile(),
    NEXT,
    replace(
        NEXT, name="qwen3-next-80b-a3b-fp8", weight_dtype="float8",
        note=f"all layers' weights count as 8 bits, though some small ones are bfloat16; {FLOAT32_ASSUMED}",
    ),
    Profile(
        "qwen3-8b", "huggingface.co/Qwen/Qwen3-8B, config.json", 4096, 151_936,
        ((GroupedAttention(4096, 32, 8, 128, normed=True), 36), (Mlp(4096, 12288), 36)),
    ),
)  # fmt: skip
