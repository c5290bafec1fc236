"""Routed experts, with and without a shared one.

Shapes: N rows of a step, C model width, X width that experts take (C, or a latent's), E experts, J experts a token,
G groups of experts, R rows routed to one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headwater.layers.feed_forward import Experts
from headwater.mixers.activations import sigmoid
from headwater.mixers.gpu import has_kernels
from headwater.mixers.linear import Linear
from headwater.mixers.mlp import AnyMlp, GatedMlp, PlainMlp, mlp_of
from headwater.mixers.weights import Weights

if TYPE_CHECKING:  # it needs Triton
    from headwater.mixers.gpu.experts import StackedExperts

SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits_NE: torch.softmax(logits_NE, dim=-1),
    "sigmoid": sigmoid,
}


@dataclass(frozen=True)
class Router:
    """Which experts a token goes to, and how much each of them counts."""

    shape: Experts
    product: Linear  # C -> E
    correction_E: torch.Tensor | None = None

    @classmethod
    def of(cls, shape: Experts, weights: Weights) -> Router:
        """Sigmoid scores are close to each other where logits are large, so they are computed in float32 throughout."""
        if shape.scores == "sigmoid":
            weights = weights.in_float32()
        correction_E = weights.vector("correction") if shape.corrected else None
        return cls(shape, weights.linear("gate"), correction_E)

    def choose(self, x_NC: torch.Tensor, n_prefill: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (in x's dtype) and indices of each token's experts, the first choice first."""
        score_NE = SCORES[self.shape.scores](self.product(x_NC.to(self.product.dtype), n_prefill).float())
        rank_NE = score_NE if self.correction_E is None else score_NE + self.correction_E
        if self.shape.groups > 1:
            rank_NE = self._of_best_groups(rank_NE)
        expert_NJ = torch.topk(rank_NE, self.shape.per_token, dim=-1).indices
        weight_NJ = score_NE.gather(1, expert_NJ)
        if self.shape.normalise:
            weight_NJ = weight_NJ / weight_NJ.sum(dim=-1, keepdim=True).clamp_min(1e-20)  # sigmoids may all be zero
        return weight_NJ.mul_(self.shape.scale).to(x_NC.dtype), expert_NJ

    def _of_best_groups(self, rank_NE: torch.Tensor) -> torch.Tensor:
        """-inf for experts of all other groups; a group is as good as its two best experts together."""
        rank_NGX = rank_NE.unflatten(1, (self.shape.groups, -1))
        two = min(2, rank_NGX.shape[-1])
        of_group_NG = rank_NGX.topk(two, dim=-1).values.sum(dim=-1)
        best_NX = of_group_NG.topk(self.shape.groups_per_token, dim=-1).indices
        left_out_NG = torch.ones_like(of_group_NG, dtype=torch.bool).scatter_(1, best_NX, False)
        return rank_NGX.masked_fill(left_out_NG[:, :, None], float("-inf")).flatten(1)


@dataclass(frozen=True)
class MixtureOfExperts:
    """Each token's J experts, weighted, and the shared expert, behind a sigmoid gate or not.

    A row's bits depend on the row alone: an expert computes rows independently of each other, and a token's experts are
    added in the order of choice.
    """

    router: Router
    experts: tuple[AnyMlp, ...]
    shared: AnyMlp | None = None
    shared_gate: Linear | None = None  # C -> 1
    latent: tuple[Linear, Linear] | None = None  # C -> X and X -> C, around the routed experts
    stacked: StackedExperts | None = None  # of the same weights: what decoding rows go through on a GPU

    @classmethod
    def of(cls, shape: Experts, weights: Weights) -> MixtureOfExperts:
        below = weights.below("shared_expert")
        tensors = _stacked(shape, weights)
        return cls(
            router=Router.of(shape, weights),
            experts=_experts(shape, weights, tensors),
            stacked=_on_gpu(shape, tensors) if has_kernels(weights.device) else None,
            shared=mlp_of(shape.shared_expert, below) if shape.shared else None,
            shared_gate=weights.linear("shared_expert_gate") if shape.shared_gate else None,
            latent=(weights.linear("latent_in"), weights.linear("latent_out")) if shape.latent else None,
        )

    def forward(self, x_NC: torch.Tensor, n_prefill: int = 0) -> torch.Tensor:
        total_NC = self._routed(x_NC, n_prefill)
        if self.shared is None:
            return total_NC
        shared_NC = self.shared.forward(x_NC, n_prefill)
        if self.shared_gate is not None:
            shared_NC = sigmoid(self.shared_gate(x_NC, n_prefill)) * shared_NC
        return total_NC.add_(shared_NC)

    def _routed(self, x_NC: torch.Tensor, n_prefill: int) -> torch.Tensor:
        """The weighted sum of each token's experts."""
        weight_NJ, expert_NJ = self.router.choose(x_NC, n_prefill)
        x_NX = x_NC if self.latent is None else self.latent[0](x_NC, n_prefill)
        routed_NJX = self._run(x_NX, expert_NJ, n_prefill)
        total_NX = torch.zeros_like(x_NX)
        for routed_NX, weight_N in zip(routed_NJX.unbind(1), weight_NJ.unbind(1), strict=True):
            total_NX += routed_NX * weight_N[:, None]
        return total_NX if self.latent is None else self.latent[1](total_NX, n_prefill)

    def _run(self, x_NX: torch.Tensor, expert_NJ: torch.Tensor, n_prefill: int) -> torch.Tensor:
        """Each token through each of its experts, [N, J, X]."""
        if self.stacked is None or n_prefill == len(x_NX):
            return self._run_experts(x_NX, expert_NJ)
        decoded_BJX = self.stacked.forward(x_NX[n_prefill:], expert_NJ[n_prefill:])
        if n_prefill == 0:
            return decoded_BJX
        return torch.cat([self._run_experts(x_NX[:n_prefill], expert_NJ[:n_prefill]), decoded_BJX])

    def _run_experts(self, x_NX: torch.Tensor, expert_NJ: torch.Tensor) -> torch.Tensor:
        """The same, one product an expert that has rows."""
        order_R = torch.argsort(expert_NJ.flatten(), stable=True)
        counts = torch.bincount(expert_NJ.flatten(), minlength=len(self.experts)).tolist()
        out_RX = x_NX.new_empty(order_R.shape[0], x_NX.shape[1])
        for expert, rows_R in zip(self.experts, order_R.split(counts), strict=True):
            if rows_R.shape[0]:
                out_RX[rows_R] = expert.forward(x_NX[rows_R // expert_NJ.shape[1]])
        return out_RX.view(*expert_NJ.shape, -1)


def _stacked(shape: Experts, weights: Weights) -> list[torch.Tensor]:
    """Weights of all experts, a tensor [E, N, K] for each product: views of the file, or where kernels read them."""
    names = ("gate_proj", "up_proj", "down_proj")[not shape.gated :]
    stored = [weights.stored(f"experts.{name}.weight") for name in names]
    return [weights.cast(tensor).contiguous() for tensor in stored] if has_kernels(weights.device) else stored


def _experts(shape: Experts, weights: Weights, stacked: list[torch.Tensor]) -> tuple[AnyMlp, ...]:
    """Each packed on its own."""
    products = (map(weights.packed, parts) for parts in zip(*stacked, strict=True))
    kind = GatedMlp if shape.gated else PlainMlp
    return tuple(kind(*expert, activation=shape.activation) for expert in products)


def _on_gpu(shape: Experts, stacked: list[torch.Tensor]) -> StackedExperts:
    from headwater.mixers.gpu.experts import StackedExperts

    gate_ENK = stacked[0] if shape.gated else None
    return StackedExperts(gate_ENK, *stacked[-2:], shape.activation)
