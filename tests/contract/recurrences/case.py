"""Cases of the contract: a kind of recurrent layer with its reference, and random weights for it.

L tokens of a sequence, D model width, X shape of a state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from headwater.layers.layer import Layer
from headwater.mixers.recurrent import RecurrentMixer
from headwater.mixers.weights import Weights
from headwater.models.build import RECURRENT

WIDTH = 32  # of the model; channel 0 of every token is 1, so a product's first column is a bias
Tensors = dict[str, torch.Tensor]
Fill = Callable[[torch.Tensor, torch.Generator], object]  # fills a weight in place


@dataclass(frozen=True)
class Recurrence:
    """A kind of layer, as its reference has it."""

    shapes: Mapping[str, Layer]  # name -> one that the contract is held to; the first one at the extremes, too
    # layer, weights and tokens [L, D] in float64 -> outputs [L, D] and the recurrent state after the last token
    reference: Callable[[Any, Tensors, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    # layer, weights, transition in its smallest form, state -> the state that the transition makes of it, float64
    moved: Callable[[Any, Tensors, torch.Tensor, torch.Tensor], torch.Tensor]
    transition: Callable[[Any], tuple[int, ...]]  # the smallest form's shape
    parts: int = 1  # equal ones, in which the reference uses the outputs of its widest product
    remembers: Callable[[Any], int] = lambda layer: 100  # layer -> tokens after which the state before them is seen
    fill: Mapping[str, Fill] = field(default_factory=dict)  # end of a weight's name -> how it is filled
    extremes: Mapping[str, Mapping[str, Fill]] = field(
        default_factory=dict
    )  # of gates: name -> what is filled otherwise


@dataclass(frozen=True)
class Case:
    """One line of the table: a layer of some shape with random weights."""

    layer: Layer
    of: Recurrence
    extreme: str = ""  # the name of one

    def tensors(self) -> Tensors:
        """Each weight is filled by the longest name that it ends with; float32."""
        generator = torch.Generator().manual_seed(0)
        fills = {**FILL, **self.of.fill, **(self.of.extremes[self.extreme] if self.extreme else {})}
        tensors = {}
        for name, shape in self.layer.tensors().items():
            tensors[name] = torch.randn(shape, generator=generator) * 0.3
            known = [end for end in fills if name.endswith(end)]
            if known:
                fills[max(known, key=len)](tensors[name], generator)
        return tensors

    def build(self, dtype: torch.dtype = torch.float32) -> RecurrentMixer[Any]:
        return RECURRENT[type(self.layer)](self.layer, Weights(self.tensors(), dtype))

    def reference(self, x_LD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [L, D] and the recurrent state after the last token, from float64 arithmetic token by token."""
        return self.of.reference(self.layer, self.in_float64(), x_LD.double())

    def moved(self, transition_X: torch.Tensor, state_X: torch.Tensor) -> torch.Tensor:
        """T∘S in float64."""
        return self.of.moved(self.layer, self.in_float64(), transition_X.double(), state_X.double())

    def in_float64(self) -> Tensors:
        return {name: tensor.double() for name, tensor in self.tensors().items()}


def uniform(low: float, high: float) -> Fill:
    return lambda weight, generator: weight.uniform_(low, high, generator=generator)


def constant(value: float) -> Fill:
    return lambda weight, generator: weight.fill_(value)


def scaled(factor: float) -> Fill:
    return lambda weight, generator: weight.mul_(factor)


def rows(first: int, last: int, bias: float) -> Fill:
    """The product's outputs [first, last) are this number, whatever the token."""

    def fill(weight: torch.Tensor, generator: torch.Generator) -> None:
        weight[first:last] = 0
        weight[first:last, 0] = bias

    return fill


FILL: dict[str, Fill] = {
    "A_log": uniform(-7.0, 1.0),  # states that last for a few tokens, and for a thousand
    "norm.weight": lambda weight, generator: weight.add_(1.0),
    "bias": uniform(-0.3, 0.3),
}


def tokens(n: int, seed: int = 1, width: int = WIDTH) -> torch.Tensor:
    x_LD = torch.randn(n, width, generator=torch.Generator().manual_seed(seed))
    x_LD[:, 0] = 1.0
    return x_LD
