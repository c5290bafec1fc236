"""Routed experts on a CPU: router, products and weighted sum of all rows by kernels, without a loop over experts.

An expert's weights are read once for all rows that chose it. N rows of a step, C model width, X width that experts
take, I intermediate width, J experts a token, E experts, R = N · J rows of experts, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.kernels import routing
from headwater.kernels.experts import MAX_ROWS_PER_THREAD, multiply_integers_into, multiply_into
from headwater.kernels.integers import multiply_integers
from headwater.kernels.recording import empty, flat
from headwater.kernels.tile import BLOCK, PANEL
from headwater.layers.feed_forward import CLAMPED_SWIGLU, Experts
from headwater.mixers import activations, numerics
from headwater.mixers.feed_forward import MixtureOfExperts, expert_biases, expert_weights, parts_of
from headwater.mixers.panels import ACTIVATIONS, held, scratch
from headwater.mixers.products import Weight
from headwater.mixers.quantised import Quantised
from headwater.mixers.weights import Weights, format_of, weights_as_one

Array = np.ndarray[Any, Any]
SCORES = {"softmax": routing.SOFTMAX, "sigmoid": routing.SIGMOID}


@dataclass(frozen=True)
class Routes:
    """A step's rows in the order of experts: where each expert's begin, and the experts that have any."""

    begins: Array  # [E + 1]
    chosen: Array  # their number, then the experts


class ExpertProduct:
    """The product of each row with the weight of its expert; weights are held in panels, one after the other."""

    def __init__(self, weights: Sequence[Weight], dtype: torch.dtype, bias_EN: Tensor | None = None) -> None:
        self.n_out, self.n_in = weights[0].shape
        self.dtype, self.width = dtype, -(-self.n_out // PANEL) * PANEL
        self.held = held(_stacked(weights), dtype)
        self._order = _orders(weights)
        missing = (0, self.width - self.n_out)
        self._bias = flat(torch.empty(0) if bias_EN is None else F.pad(bias_EN, missing))

    def __call__(self, x_RK: Tensor, routes: Routes, then: str = "none", factor_RN: Tensor | None = None) -> Tensor:
        """Return then(x Wᵀ + b) · factor, [R, N], with columns of zeros up to a multiple of 64; x may have some."""
        y_RN = empty(len(x_RK), self.width, dtype=self.dtype)
        x, x_row, n_in = self._inputs(x_RK if self._order is None else self._ordered(x_RK, self._order, routes))
        factor, factor_row = (flat(y_RN), 0) if factor_RN is None else (flat(factor_RN), factor_RN.stride(0))
        multiply = multiply_integers_into if self.held.few is multiply_integers else multiply_into
        multiply(
            flat(y_RN), self.width, x, x_row, self.held.arrays, n_in, self.width, ACTIVATIONS[then],
            factor, factor_row, routes.begins, routes.chosen, self._bias,
            scratch((MAX_ROWS_PER_THREAD + BLOCK) * PANEL),
        )  # fmt: skip
        return y_RN

    def _inputs(self, x_RK: Tensor) -> tuple[Array, int, int]:
        """Return rows as the kernel reads them, the elements from one to the next, and the inputs."""
        n_in = self.n_in + self.n_in % 2 if self.held.pairs else self.n_in
        if x_RK.shape[1] < n_in:
            x_RK = F.pad(x_RK, (0, 1))
        if self.held.dot:
            pairs: Array = x_RK.view(torch.int32).view(-1).numpy()
            return pairs, x_RK.shape[1] // 2, n_in
        return flat(x_RK.float()), x_RK.shape[1], n_in

    def _ordered(self, x_RK: Tensor, order: Array, routes: Routes) -> Tensor:
        """Return rows with their inputs in the order of their expert's weight."""
        ordered_RK, n_experts = empty(len(x_RK), self.n_in, dtype=x_RK.dtype), len(routes.begins) - 1
        routing.order_into(flat(ordered_RK), flat(x_RK), x_RK.stride(0), order, routes.begins, n_experts, self.n_in)
        return ordered_RK


def _orders(weights: Sequence[Weight]) -> Array | None:
    """Return the order of inputs of each expert's weight, flat; None if all have their own."""
    orders = [weight.order_K if isinstance(weight, Quantised) else None for weight in weights]
    if all(order_K is None for order_K in orders):
        return None
    own_K = torch.arange(weights[0].shape[1])
    return flat(torch.cat([own_K if order_K is None else order_K for order_K in orders]))


def _layout(weight: Weight) -> tuple[object, ...]:
    """Return all that has to be equal for weights to be held together."""
    return format_of(weight if isinstance(weight, Tensor) else replace(weight, order_K=None))


def _stacked(weights: Sequence[Weight]) -> Weight:
    """Return the weights of all experts as one, each filled up to whole panels."""
    return weights_as_one([_filled_up(weight, (0, 0, 0, -weight.shape[0] % PANEL)) for weight in weights])


def _filled_up(weight: Weight, missing: tuple[int, ...]) -> Weight:
    if isinstance(weight, Tensor):
        return F.pad(weight, missing)
    parts: dict[str, Any] = {name: F.pad(part, missing) for name, part in weight.parts()}
    return replace(weight, **parts, order_K=None)


@dataclass(frozen=True, kw_only=True)
class ExpertsOnCpu(MixtureOfExperts):
    """Routed experts whose rows, of prompts and of answers, are computed by kernels."""

    up: ExpertProduct
    down: ExpertProduct
    gate: ExpertProduct | None
    activation: str

    @classmethod
    def of(cls, shape: Experts, weights: Weights) -> MixtureOfExperts:
        """Hold the weights of all experts together if products are those of kernels, and formats are the same."""
        stacked = expert_weights(shape, weights)
        if numerics.current().mode != "compiled" or any(len(set(map(_layout, parts))) > 1 for parts in stacked):
            return MixtureOfExperts.of(shape, weights)
        *gate, up, down = (
            weights.of_experts(parts, partial(ExpertProduct, bias_EN=bias_EN))
            for parts, bias_EN in zip(stacked, expert_biases(shape, weights), strict=True)
        )
        parts = parts_of(shape, weights, [[] for _ in stacked])
        return cls(**parts, up=up, down=down, gate=gate[0] if gate else None, activation=shape.activation)

    def _routed(self, x_NC: Tensor, n_prefill: int) -> Tensor:
        product = self.router.product
        logits_NE = product(x_NC.to(product.dtype), n_prefill)
        if self.latent is None:
            return self.by_logits(x_NC, logits_NE)
        return self.latent[1](self.by_logits(self.latent[0](x_NC, n_prefill), logits_NE), n_prefill)

    def by_logits(self, x_NX: Tensor, logits_NE: Tensor) -> Tensor:
        """Return the weighted sum of what the experts give that each row's logits choose."""
        shape, none = self.router.shape, torch.empty(0)
        weight_NJ = empty(len(x_NX), shape.per_token)
        expert_NJ = empty(len(x_NX), shape.per_token, dtype=torch.int64)
        correction = flat(none if self.router.correction_E is None else self.router.correction_E)
        routing.choose_into(
            flat(weight_NJ), flat(expert_NJ), flat(logits_NE), logits_NE.stride(0), len(x_NX), shape.experts,
            SCORES[shape.scores], correction, shape.groups, shape.groups_per_token, shape.per_token,
            shape.normalise, shape.sum_epsilon, shape.scale,
        )  # fmt: skip
        return self._sum(x_NX.contiguous(), flat(weight_NJ), flat(expert_NJ))

    def _sum(self, x_NX: Tensor, weight: Array, expert: Array) -> Tensor:
        """Return the weighted sum of what each row's experts give."""
        n, width, n_experts = *x_NX.shape, self.router.shape.experts
        rows, per_token = len(expert), self.router.shape.per_token
        x_RX, place = empty(rows, width, dtype=x_NX.dtype), np.empty(rows, np.int64)
        routes = Routes(np.empty(n_experts + 1, np.int64), np.empty(n_experts + 1, np.int64))
        routing.gather_into(
            flat(x_RX), place, routes.begins, routes.chosen, expert, n, per_token, n_experts, flat(x_NX), width, width
        )
        routed_RX, total_NX = self.down(self._hidden(x_RX, routes), routes), empty(n, width, dtype=x_NX.dtype)
        routing.add_into(flat(total_NX), flat(routed_RX), routed_RX.stride(0), weight, place, n, per_token, width)
        return total_NX

    def _hidden(self, x_RX: Tensor, routes: Routes) -> Tensor:
        """Return the inputs of `down`."""
        if self.gate is not None and self.activation == CLAMPED_SWIGLU:
            gate_RI, up_RI = self.gate(x_RX, routes), self.up(x_RX, routes)
            return activations.clamped_swiglu(gate_RI, up_RI, self.router.shape.limit)
        activate = activations.ACTIVATIONS[self.activation]
        if self.gate is None:
            return activate(self.up(x_RX, routes))
        if self.activation == "silu":
            opened_RI = self.gate(x_RX, routes, "swish")
        else:
            opened_RI = activate(self.gate(x_RX, routes))
        if limit := self.router.shape.limit:
            return activations.limited_(opened_RI, self.up(x_RX, routes), limit)
        return self.up(x_RX, routes, factor_RN=opened_RI)
