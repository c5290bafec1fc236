"""Feed-forward layers: they keep nothing of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.models.profiles.layer import Layer
from headwater.types import PrefillFlops


@dataclass(frozen=True, slots=True)
class Mlp(Layer):
    """Up and down, and the gate beside them where there is one."""

    kind: ClassVar[str] = "mlp"
    intermediate: int
    gated: bool = True

    @property
    def weights(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.intermediate


@dataclass(frozen=True, slots=True)
class Experts(Layer):
    """Routed gated MLPs, and one that every token passes."""

    kind: ClassVar[str] = "moe"
    experts: int
    per_token: int
    intermediate: int
    shared: int = 0  # intermediate size of the shared expert, or of all of them together
    shared_gate: bool = False  # the shared expert has a gate of one channel

    @property
    def weights(self) -> int:
        return self._of(self.experts)

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
        """Elements of the router, that many experts, and the shared one."""
        always = self.hidden * (3 * self.shared + self.experts + self.shared_gate)
        return always + experts * self.expert_weights
