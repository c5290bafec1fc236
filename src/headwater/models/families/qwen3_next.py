"""Qwen3-Next: two input projections a Gated DeltaNet, interleaved by key head."""

from __future__ import annotations

from headwater.models.families.family import Family, Shapes
from headwater.spec import ModelSpec


def _projections(spec: ModelSpec) -> Shapes:
    d, hidden = spec.delta_net, spec.hidden_size
    return {
        "in_proj_qkvz.weight": (d.channels + d.v_heads * d.v_dim, hidden),
        "in_proj_ba.weight": (2 * d.v_heads, hidden),
    }


QWEN3_NEXT = Family(_projections)
