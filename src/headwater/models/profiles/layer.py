"""What one kind of layer costs. Elements, not bytes: the profile knows how wide an element is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from headwater.types import PrefillFlops


@dataclass(frozen=True, slots=True)
class Layer(ABC):
    """One sublayer of a model. FLOPs are two a multiply-add; norms, activations and rotation are left out."""

    kind: ClassVar[str]
    hidden: int  # the model's width

    @property
    @abstractmethod
    def weights(self) -> int:
        """Elements of all weights, without the norm before the layer."""

    @property
    def flops(self) -> PrefillFlops:
        """FLOPs of a prefill; a layer that sees only its state, or only the token, has no quadratic part."""
        return PrefillFlops(2 * self.weights, 0)

    def weights_read(self, tokens: int) -> float:
        """Elements of weights that a step over so many tokens reads: all, unless experts are chosen."""
        return self.weights

    def kv_elements(self, tensor_parallel: int) -> int:
        """Elements of KV a token, on all devices together."""
        return 0

    @property
    def states(self) -> tuple[tuple[str, int], ...]:
        """Elements of each state of a sequence: "recurrent" and "conv"."""
        return ()
