"""Feed-forward layers: they keep nothing of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.layers.layer import Layer, Shapes
from headwater.plan import PrefillFlops

CLAMPED_SWIGLU = "clamped_swiglu"  # of gate and up together, both within the limit (gpt-oss)


@dataclass(frozen=True, slots=True)
class Mlp(Layer):
    """An MLP: projections up and down, and a gate if it has one."""

    kind: ClassVar[str] = "mlp"
    intermediate: int
    gated: bool = True
    activation: str = "silu"  # of the gate, or of the up projection without a gate
    bias: bool = False  # of all its products
    gate_scale: float = 1.0  # the gate is multiplied by this before the activation
    limit: float = 0.0  # of the activated gate (of a clamped SwiGLU: the gate), and of the up projection's magnitude

    def tensors(self) -> Shapes:
        outputs = {name: self.intermediate for name in ("gate_proj", "up_proj")[not self.gated :]}
        shapes: Shapes = {f"{name}.weight": (n, self.hidden) for name, n in outputs.items()}
        shapes["down_proj.weight"] = (self.hidden, self.intermediate)
        if self.bias:
            shapes |= {f"{name}.bias": (n,) for name, n in (outputs | {"down_proj": self.hidden}).items()}
        return shapes


@dataclass(frozen=True, slots=True)
class Experts(Layer):
    """Routed MLPs, and one that every token passes.

    An expert's weight is its score. It is chosen by the score, or by the score and a correction that only the choice
    sees (DeepSeek-V3, section 2.1.2). A softmax over only the chosen logits is `normalise` with softmax scores.
    """

    kind: ClassVar[str] = "moe"
    kept: ClassVar[frozenset[str]] = frozenset({"gate", "shared_expert_gate"})
    experts: int
    per_token: int
    intermediate: int
    shared: int = 0  # intermediate size of the shared expert, or of all of them together
    shared_gate: bool = False  # the shared expert has a gate of one channel
    normalise: bool = True  # the chosen experts' weights are divided by their sum
    sum_epsilon: float = 1e-20  # added to that sum: sigmoids may all be zero
    scores: str = "softmax"  # of the router's logits: "softmax" or "sigmoid"
    float32_router: bool = False  # the router's product is computed in float32, as it always is for sigmoids
    corrected: bool = False  # experts are chosen by score + correction
    groups: int = 1  # of experts; those are chosen from the best ones only, by the sum of a group's two best
    groups_per_token: int = 1
    scale: float = 1.0  # of the routed experts' weights
    gated: bool = True  # as in Mlp, of all experts
    activation: str = "silu"
    latent: int = 0  # channels into and out of routed experts, between two products of their own; 0: `hidden`
    bias: bool = False  # of the shared expert and of the products around a latent
    limit: float = 0.0  # as in Mlp, of routed experts
    shared_limit: float = 0.0
    routed_bias: bool = False  # of the router and of routed experts

    def tensors(self) -> Shapes:
        """Return names and shapes; tensors of experts have a leading dimension of experts."""
        hidden = self.hidden
        shapes: Shapes = {"gate.weight": (self.experts, hidden)}
        if self.routed_bias:
            shapes["gate.bias"] = (self.experts,)
        if self.corrected:
            shapes["correction"] = (self.experts,)
        for name, shape in self.expert.tensors().items():
            shapes[f"experts.{name}"] = (self.experts, *shape)
        if self.latent:
            products = {"latent_in": (self.latent, hidden), "latent_out": (hidden, self.latent)}
            shapes |= {f"{name}.weight": shape for name, shape in products.items()}
            shapes |= {f"{name}.bias": shape[:1] for name, shape in products.items() if self.bias}
        if self.shared:
            shapes |= {f"shared_expert.{name}": shape for name, shape in self.shared_expert.tensors().items()}
        if self.shared_gate:
            shapes["shared_expert_gate.weight"] = (1, hidden)
        return shapes

    @property
    def expert(self) -> Mlp:
        """One routed expert."""
        width = self.latent or self.hidden
        return Mlp(width, self.intermediate, self.gated, self.activation, self.routed_bias, limit=self.limit)

    @property
    def shared_expert(self) -> Mlp:
        return Mlp(self.hidden, self.shared, self.gated, self.activation, self.bias, limit=self.shared_limit)

    @property
    def flops(self) -> PrefillFlops:
        return PrefillFlops(2 * self._of(self.per_token), 0)

    @property
    def expert_weights(self) -> int:
        """Elements of one routed expert."""
        return self.expert.weights

    def weights_read(self, tokens: int) -> float:
        return self._of(0) + self.expert_weights * self.hit(tokens)

    def hit(self, tokens: float) -> float:
        """Return the expected number of distinct experts that `tokens` tokens choose, if each chooses uniformly."""
        missed: float = (1 - self.per_token / self.experts) ** tokens
        return self.experts * (1 - missed)

    def _of(self, experts: int) -> int:
        """Return the elements of products with `experts` routed experts."""
        return self.product_weights - (self.experts - experts) * self.expert.product_weights
