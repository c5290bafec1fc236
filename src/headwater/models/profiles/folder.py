"""The profile of a checkpoint's folder: the shapes of its ModelSpec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from headwater.models.profiles.attention import GroupedAttention
from headwater.models.profiles.feed_forward import Experts, Mlp
from headwater.models.profiles.layer import Layer
from headwater.models.profiles.profile import Profile
from headwater.models.profiles.recurrent import DeltaNet
from headwater.spec import ModelSpec


def profile_of(spec: ModelSpec, folder: Path) -> Profile:
    """What that model costs, named after its folder."""
    counts = Counter(spec.mixers + spec.ffns)
    return Profile(
        name=folder.resolve().name,
        source=str(folder / "config.json"),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        layers=tuple((_LAYERS[kind](spec), n) for kind, n in counts.items()),
        dtype_name=spec.dtype_name,
        weight_dtype=spec.dtype_name,
        tied=spec.tied,
    )


def _attention(spec: ModelSpec) -> Layer:
    a = spec.attention
    return GroupedAttention(spec.hidden_size, a.heads, a.kv_heads, a.head_dim, gated=True, normed=True)


def _delta_net(spec: ModelSpec) -> Layer:
    d = spec.delta_net
    return DeltaNet(spec.hidden_size, d.k_heads, d.v_heads, d.k_dim, d.v_dim, d.conv_kernel)


def _experts(spec: ModelSpec) -> Layer:
    m = spec.moe
    assert m is not None
    shared = m.shared_intermediate
    return Experts(spec.hidden_size, m.experts, m.per_token, m.intermediate, shared, shared_gate=True)


_LAYERS: dict[str, Callable[[ModelSpec], Layer]] = {
    "attention": _attention,
    "gated_delta_net": _delta_net,
    "mlp": lambda spec: Mlp(spec.hidden_size, spec.intermediate_size),
    "moe": _experts,
}
