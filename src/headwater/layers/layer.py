"""Protocol of layers: tensors, FLOPs, KV and states."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from headwater.plan import PrefillFlops

Shapes = dict[str, tuple[int, ...]]
GROUP = 64  # inputs: the smallest group of a quantised weight that shares a scale


@dataclass(frozen=True, slots=True)
class Layer(ABC):
    """One function of a model: its tensors, and what it costs in elements (how wide one is, the model knows).

    FLOPs are two a multiply-add; norms, activations and rotation are left out.
    """

    kind: ClassVar[str]
    kept: ClassVar[frozenset[str]] = frozenset()  # products that are never quantised: small gates, steps, routers
    float32_states: ClassVar[frozenset[str]] = frozenset({"recurrent"})  # names; others have the model's dtype
    hidden: int  # the model's width

    @abstractmethod
    def tensors(self) -> Shapes:
        """Return Headwater's names of the weights and their shapes, without the norm before the layer.

        Products are named `….weight` with [outputs, inputs], and `….bias`; a family renames what it calls otherwise.
        """

    @property
    def weights(self) -> int:
        """Elements of all weights."""
        return sum(math.prod(shape) for shape in self.tensors().values())

    @property
    def product_weights(self) -> int:
        """Elements that a token is multiplied with: the weights of products."""
        return sum(math.prod(shape) for name, shape in self.tensors().items() if is_product(name, shape))

    def quantised(self) -> Shapes:
        """Return the weights that are held as integers if weights are quantised, and how much of each.

        Some have only their first rows quantised. A weight whose inputs no group divides is not.
        """
        return {name: shape for name, shape in self._large_products().items() if shape[-1] % GROUP == 0}

    def undivided(self) -> Shapes:
        """Return the weights that would be quantised if a group divided their inputs."""
        return {name: shape for name, shape in self._large_products().items() if shape[-1] % GROUP}

    def _large_products(self) -> Shapes:
        shapes = self.tensors().items()
        return {n: s for n, s in shapes if is_product(n, s) and n.removesuffix(".weight") not in self.kept}

    @property
    def quantised_weights(self) -> int:
        """Elements that are held as integers if weights are quantised."""
        return sum(math.prod(shape) for shape in self.quantised().values())

    @property
    def token_flops(self) -> int:
        """FLOPs a token in addition to those of products, as of a recurrence and its convolution."""
        return 0

    @property
    def flops(self) -> PrefillFlops:
        """FLOPs of a prefill; a layer that sees only its state, or only the token, has no quadratic part."""
        return PrefillFlops(2 * self.product_weights + self.token_flops, 0)

    def weights_read(self, tokens: int) -> float:
        """Return the elements of weights that a step over `tokens` tokens reads: all, unless experts are chosen."""
        return self.weights

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """Elements a token of each thing that grows with the sequence: of K and of V, or of one latent row."""
        return ()

    def kv_elements(self, tensor_parallel: int) -> int:
        """Elements of KV a token, on all devices together."""
        return sum(self.kv_widths)

    @property
    def states(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of each state."""
        return ()

    @property
    def draft_elements(self) -> int:
        """Elements, of the model's dtype, that are kept of a draft until it is judged: what updates the states."""
        return 0

    @property
    def tail_elements(self) -> int:
        """Elements, of the model's dtype, that a tail keeps of a token: the inputs from which the state is updated."""
        return 0

    @property
    def transition(self) -> tuple[int, ...] | None:
        """Shape of what a run of tokens does to the recurrent state before them, float32; None without such a state."""
        return None

    @property
    def composes(self) -> bool:
        """True if the stored tensors of a segment can be reused at any position."""
        return True

    @property
    def state_elements(self) -> dict[str, int]:
        """Elements of each state by its name."""
        return {name: math.prod(shape) for name, shape in self.states}


def is_product(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is the weight of a product; a convolution's, with three dimensions, is not."""
    return len(shape) >= 2 and name.endswith("weight") and "conv" not in name
