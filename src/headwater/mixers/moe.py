"""Routed experts with a shared expert (Qwen3-Next, Qwen3.5-MoE).

Shapes: N rows of a step, C model width, E experts, J experts a token, R rows routed to one expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.layers.feed_forward import Experts, Mlp
from headwater.mixers.activations import sigmoid
from headwater.mixers.linear import Linear
from headwater.mixers.mlp import GatedMlp
from headwater.mixers.weights import Weights


@dataclass(frozen=True)
class MixtureOfExperts:
    """Each token's J most probable experts, weighted, and the shared expert behind a sigmoid gate.

    A row's bits depend on the row alone: an expert computes rows independently of each other, and a token's experts are
    added in the order of their probability.
    """

    shape: Experts
    router: Linear  # C -> E
    experts: tuple[GatedMlp, ...]
    shared: GatedMlp | None
    shared_gate: Linear | None  # C -> 1

    @classmethod
    def of(cls, shape: Experts, weights: Weights) -> MixtureOfExperts:
        stacked = [weights.stored(f"experts.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj")]
        return cls(
            shape=shape,
            router=weights.linear("gate"),
            experts=tuple(GatedMlp(*map(weights.packed, parts)) for parts in zip(*stacked, strict=True)),
            shared=GatedMlp.of(Mlp(shape.hidden, shape.shared), weights.below("shared_expert"))
            if shape.shared
            else None,
            shared_gate=weights.linear("shared_expert_gate") if shape.shared_gate else None,
        )

    def forward(self, x_NC: torch.Tensor, n_prefill: int = 0) -> torch.Tensor:
        weight_NJ, expert_NJ = self._route(x_NC, n_prefill)
        routed_NJC = self._run_experts(x_NC, expert_NJ)
        total_NC = torch.zeros_like(x_NC)
        for j in range(self.shape.per_token):
            total_NC += routed_NJC[:, j] * weight_NJ[:, j, None]
        if self.shared is None:
            return total_NC
        shared_NC = self.shared.forward(x_NC, n_prefill)
        if self.shared_gate is not None:
            shared_NC = sigmoid(self.shared_gate(x_NC, n_prefill)) * shared_NC
        return total_NC.add_(shared_NC)

    def _route(self, x_NC: torch.Tensor, n_prefill: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (in x's dtype) and indices of each token's experts, the most probable first."""
        probability_NE = torch.softmax(self.router(x_NC, n_prefill), dim=-1, dtype=torch.float32)
        weight_NJ, expert_NJ = torch.topk(probability_NE, self.shape.per_token, dim=-1)
        if self.shape.normalise:
            weight_NJ = weight_NJ / weight_NJ.sum(dim=-1, keepdim=True)
        return weight_NJ.to(x_NC.dtype), expert_NJ

    def _run_experts(self, x_NC: torch.Tensor, expert_NJ: torch.Tensor) -> torch.Tensor:
        """Each token through each of its experts, [N, J, C]; one product an expert that has rows."""
        order_R = torch.argsort(expert_NJ.flatten(), stable=True)
        counts = torch.bincount(expert_NJ.flatten(), minlength=self.shape.experts).tolist()
        out_RC = x_NC.new_empty(order_R.shape[0], x_NC.shape[1])
        for expert, rows_R in zip(self.experts, order_R.split(counts), strict=True):
            if rows_R.shape[0]:
                out_RC[rows_R] = expert.forward(x_NC[rows_R // self.shape.per_token])
        return out_RC.view(x_NC.shape[0], self.shape.per_token, -1)
