"""Feed-forward layers: MLPs with a gate and without, and routed experts with a shared expert and without.

Shapes: N rows of a step, C model width, I intermediate width, X width that experts take (C, or a latent's), E experts,
J experts a token, G groups of experts, R rows routed to one expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwater.layers.feed_forward import CLAMPED_SWIGLU, Experts, Mlp
from headwater.mixers.activations import ACTIVATIONS, Activation, clamped_swiglu, limited_, sigmoid
from headwater.mixers.linear import Linear
from headwater.mixers.products import Weight
from headwater.mixers.weights import Weights

SCORES: dict[str, Activation] = {"softmax": partial(torch.softmax, dim=-1), "sigmoid": sigmoid}


@dataclass(frozen=True)
class DenseMlp:
    """down(activation(scale · gate(x)) · up(x)), or without a gate down(activation(up(x))).

    With a limit, activated gate and up projection are rounded, then limited, whatever the rows: no kernel fuses them.
    """

    up_proj: Linear  # C -> I
    down_proj: Linear  # I -> C
    gate_proj: Linear | None = None  # C -> I
    activation: str = "silu"
    gate_scale: float = 1.0
    limit: float = 0.0

    @classmethod
    def of(cls, shape: Mlp, products: Iterable[Linear]) -> DenseMlp:
        """Build the MLP of that shape from its products in the order of `names_of`."""
        named = dict(zip(names_of(shape), products, strict=True))
        return cls(**named, activation=shape.activation, gate_scale=shape.gate_scale, limit=shape.limit)

    def forward(self, x_NC: Tensor, n_prefill: int) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self._activated(self.up_proj, x_NC, n_prefill), n_prefill)
        if self.activation == "silu" and self.gate_scale == 1.0 and not self.limit:
            return self.down_proj(self.up_proj.opened(self.gate_proj, x_NC, n_prefill), n_prefill)
        if self.activation == CLAMPED_SWIGLU:
            gate_NI, up_NI = self.gate_proj(x_NC, n_prefill), self.up_proj(x_NC, n_prefill)
            return self.down_proj(clamped_swiglu(gate_NI, up_NI, self.limit), n_prefill)
        opened_NI = self._activated(self.gate_proj, x_NC, n_prefill)
        if self.limit:
            return self.down_proj(limited_(opened_NI, self.up_proj(x_NC, n_prefill), self.limit), n_prefill)
        return self.down_proj(self.up_proj.times(x_NC, opened_NI, n_prefill), n_prefill)

    def _activated(self, product: Linear, x_NC: Tensor, n_prefill: int) -> Tensor:
        if self.activation == "silu" and self.gate_scale == 1.0:
            return product.swish(x_NC, n_prefill)
        y_NI = product(x_NC, n_prefill)
        return ACTIVATIONS[self.activation](y_NI if self.gate_proj is None else y_NI.mul_(self.gate_scale))


def names_of(shape: Mlp) -> tuple[str, ...]:
    """Return the names of an MLP's products."""
    return ("gate_proj", "up_proj", "down_proj")[not shape.gated :]


def mlp_of(shape: Mlp, weights: Weights) -> DenseMlp:
    """Build the MLP of that shape."""
    return DenseMlp.of(shape, map(weights.linear, names_of(shape)))


@dataclass(frozen=True)
class Router:
    """Choice of experts for each token, and their weights."""

    shape: Experts
    product: Linear  # C -> E
    correction_E: Tensor | None = None

    @classmethod
    def of(cls, shape: Experts, weights: Weights) -> Router:
        """Build a router; sigmoid scores of large logits are close to each other, so they are computed in float32."""
        if shape.scores == "sigmoid" or shape.float32_router:
            weights = weights.in_float32()
        correction_E = weights.vector("correction") if shape.corrected else None
        return cls(shape, weights.linear("gate"), correction_E)

    def choose(self, x_NC: Tensor, n_prefill: int) -> tuple[Tensor, Tensor]:
        """Return weights (in x's dtype) and indices of each token's experts, the first choice first."""
        score_NE = SCORES[self.shape.scores](self.product(x_NC.to(self.product.dtype), n_prefill).float())
        rank_NE = score_NE if self.correction_E is None else score_NE + self.correction_E
        if self.shape.groups > 1:
            rank_NE = self._of_best_groups(rank_NE)
        expert_NJ = torch.topk(rank_NE, self.shape.per_token, dim=-1).indices
        weight_NJ = score_NE.gather(1, expert_NJ)
        if self.shape.normalise:
            weight_NJ = weight_NJ / (weight_NJ.sum(dim=-1, keepdim=True) + self.shape.sum_epsilon)
        return weight_NJ.mul_(self.shape.scale).to(x_NC.dtype), expert_NJ

    def _of_best_groups(self, rank_NE: Tensor) -> Tensor:
        """Set experts outside the best groups to -inf; a group's rank is the sum of its two best experts'."""
        rank_NGX: Tensor = rank_NE.unflatten(1, (self.shape.groups, -1))
        two = min(2, rank_NGX.shape[-1])
        of_group_NG = rank_NGX.topk(two, dim=-1).values.sum(dim=-1)
        best_NX = of_group_NG.topk(self.shape.groups_per_token, dim=-1).indices
        left_out_NG = torch.ones_like(of_group_NG, dtype=torch.bool).scatter_(1, best_NX, False)
        return rank_NGX.masked_fill(left_out_NG[:, :, None], float("-inf")).flatten(1)


@dataclass(frozen=True)
class MixtureOfExperts:
    """Each token's J experts, weighted, and the shared expert, with a sigmoid gate or without.

    A row's bits depend only on the row: an expert computes rows independently of each other, and a token's experts are
    added in the order of choice.
    """

    router: Router
    experts: tuple[DenseMlp, ...]
    shared: DenseMlp | None = None
    shared_gate: Linear | None = None  # C -> 1
    latent: tuple[Linear, Linear] | None = None  # C -> X and X -> C, around the routed experts

    @classmethod
    def of(cls, shape: Experts, weights: Weights) -> MixtureOfExperts:
        """Pack the weights of router, experts, shared expert and latent projections."""
        return cls(**parts_of(shape, weights, expert_weights(shape, weights)))

    def forward(self, x_NC: Tensor, n_prefill: int) -> Tensor:
        total_NC = self._routed(x_NC, n_prefill)
        if self.shared is None:
            return total_NC
        shared_NC = self.shared.forward(x_NC, n_prefill)
        if self.shared_gate is not None:
            shared_NC = sigmoid(self.shared_gate(x_NC, n_prefill)) * shared_NC
        return total_NC.add_(shared_NC)

    def _routed(self, x_NC: Tensor, n_prefill: int) -> Tensor:
        """Return the weighted sum of each token's experts."""
        weight_NJ, expert_NJ = self.router.choose(x_NC, n_prefill)
        x_NX = x_NC if self.latent is None else self.latent[0](x_NC, n_prefill)
        routed_NJX = self.run(x_NX, expert_NJ, n_prefill)
        total_NX = torch.zeros_like(x_NX)
        for routed_NX, weight_N in zip(routed_NJX.unbind(1), weight_NJ.unbind(1), strict=True):
            total_NX += routed_NX * weight_N[:, None]
        return total_NX if self.latent is None else self.latent[1](total_NX, n_prefill)

    def run(self, x_NX: Tensor, expert_NJ: Tensor, n_prefill: int) -> Tensor:
        """Send each token through each of its experts, [N, J, X]: one product for each expert that has rows."""
        order_R = torch.argsort(expert_NJ.flatten(), stable=True)
        counts, of_prefill = (
            torch.bincount(some_NJ.flatten(), minlength=len(self.experts)).tolist()
            for some_NJ in (expert_NJ, expert_NJ[:n_prefill])
        )
        out_RX = x_NX.new_empty(order_R.shape[0], x_NX.shape[1])
        for expert, rows_R, n in zip(self.experts, order_R.split(counts), of_prefill, strict=True):
            if rows_R.shape[0]:
                out_RX[rows_R] = expert.forward(x_NX[rows_R // expert_NJ.shape[1]], n)
        return out_RX.view(*expert_NJ.shape, -1)


def expert_weights(shape: Experts, weights: Weights) -> list[list[Weight]]:
    """Return the weights of all experts, [N, K] each, for each product."""
    return [weights.experts(f"experts.{name}.weight") for name in names_of(shape.expert)]


def expert_biases(shape: Experts, weights: Weights) -> list[Tensor | None]:
    """Return the biases of all experts, [E, N] in float32, for each product."""
    return [weights.optional(f"experts.{name}.bias") for name in names_of(shape.expert)]


def packed_experts(shape: Experts, weights: Weights, stacked: list[list[Weight]]) -> tuple[DenseMlp, ...]:
    """Pack each expert on its own."""
    biases = expert_biases(shape, weights)

    def packed(e: int, parts: tuple[Weight, ...]) -> DenseMlp:
        of_expert = (None if bias_EN is None else bias_EN[e] for bias_EN in biases)
        return DenseMlp.of(shape.expert, map(weights.packed, parts, of_expert))

    return tuple(packed(e, parts) for e, parts in enumerate(zip(*stacked, strict=True)))


def parts_of(shape: Experts, weights: Weights, stacked: list[list[Weight]]) -> dict[str, Any]:
    """Return the fields of a `MixtureOfExperts`, its experts packed from the `stacked` weights."""
    below = weights.below("shared_expert")
    return {
        "router": Router.of(shape, weights),
        "experts": packed_experts(shape, weights, stacked),
        "shared": mlp_of(shape.shared_expert, below) if shape.shared else None,
        "shared_gate": weights.linear("shared_expert_gate") if shape.shared_gate else None,
        "latent": (weights.linear("latent_in"), weights.linear("latent_out")) if shape.latent else None,
    }


FeedForward = DenseMlp | MixtureOfExperts
