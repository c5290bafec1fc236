"""Qwen3.5, dense and with experts: four input projections a Gated DeltaNet, each in the order of heads."""

from __future__ import annotations

from headwater.models.families.family import Family, Shapes
from headwater.spec import ModelSpec


def _projections(spec: ModelSpec) -> Shapes:
    d, hidden = spec.delta_net, spec.hidden_size
    return {
        "in_proj_qkv.weight": (d.channels, hidden),
        "in_proj_z.weight": (d.v_heads * d.v_dim, hidden),
        "in_proj_b.weight": (d.v_heads, hidden),
        "in_proj_a.weight": (d.v_heads, hidden),
    }


QWEN3_5 = Family(_projections)
