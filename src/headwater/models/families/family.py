"""What differs between families of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwater.spec import ModelSpec

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """A way to store a hybrid model. Attention, norms, dense layers and experts are named alike in all of them."""

    delta_net_projections: Callable[[ModelSpec], Shapes]  # weights of a Gated DeltaNet's input projections


def delta_net_shapes(spec: ModelSpec, family: Family) -> Shapes:
    """Names, relative to the layer's mixer, and shapes of all tensors of a Gated DeltaNet."""
    d = spec.delta_net
    return family.delta_net_projections(spec) | {
        "conv1d.weight": (d.channels, 1, d.conv_kernel),
        "A_log": (d.v_heads,),
        "dt_bias": (d.v_heads,),
        "norm.weight": (d.v_dim,),
        "out_proj.weight": (spec.hidden_size, d.v_heads * d.v_dim),
    }
