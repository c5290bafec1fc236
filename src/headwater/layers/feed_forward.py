"""Feed-forward layers: they keep nothing of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.layers.layer import Layer, Shapes
from headwater.types import PrefillFlops


@dataclass(frozen=True, slots=True)
class Mlp(Layer):
    """Up and down, and the gate beside them where there is one."""

    kind: ClassVar[str] = "mlp"
    intermediate: int
    gated: bool = True
    activation: str = "silu"  # of the gate, or of what goes up where there is none

    def tensors(self) -> Shapes:
        up = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        shapes: Shapes = {f"{name}.weight": (self.intermediate, self.hidden) for name in up}
        return shapes | {"down_proj.weight": (self.hidden, self.intermediate)}

    @property
    def flops(self) -> PrefillFlops:
        return PrefillFlops(2 * self.product_weights, 0)


@dataclass(frozen=True, slots=True)
class Experts(Layer):
    """Routed gated MLPs, and one that every token passes."""

    kind: ClassVar[str] = "moe"
    experts: int
    per_token: int
    intermediate: int
    shared: int = 0  # intermediate size of the shared expert, or of all of them together
    shared_gate: bool = False  # the shared expert has a gate of one channel
    normalise: bool = True  # the chosen experts' weights are scaled to sum to 1

    def tensors(self) -> Shapes:
        """Those of experts have a dimension of experts before the others."""
        hidden, width = self.hidden, self.intermediate
        shapes: Shapes = {
            "gate.weight": (self.experts, hidden),
            "experts.gate_proj.weight": (self.experts, width, hidden),
            "experts.up_proj.weight": (self.experts, width, hidden),
            "experts.down_proj.weight": (self.experts, hidden, width),
        }
        if self.shared:
            names = Mlp(hidden, self.shared).tensors()
            shapes |= {f"shared_expert.{name}": shape for name, shape in names.items()}
        if self.shared_gate:
            shapes["shared_expert_gate.weight"] = (1, hidden)
        return shapes

    @property
    def flops(self) -> PrefillFlops:
        return PrefillFlops(2 * self._of(self.per_token), 0)

    @property
    def expert_weights(self) -> int:
        """Elements of one routed expert."""
        return 3 * self.hidden * self.intermediate

    def weights_read(self, tokens: int) -> float:
        return self._of(0) + self.expert_weights * self.hit(tokens)

    def hit(self, tokens: float) -> float:
        """Distinct experts that so many tokens are expected to choose, if each chooses evenly and on its own."""
        missed: float = (1 - self.per_token / self.experts) ** tokens
        return self.experts * (1 - missed)

    def _of(self, experts: int) -> int:
        """Elements of products with so many routed experts."""
        return self.product_weights - (self.experts - experts) * self.expert_weights
