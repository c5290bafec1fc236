"""The gated short convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.layers.layer import Layer, Shapes


@dataclass(frozen=True, slots=True)
class ShortConv(Layer):
    """Gated short convolution of LFM2 (arXiv 2511.23404): C · conv(B · x), depthwise and causal, between two products.

    The projection's outputs have the order B, C, x. The state is the last inputs B · x of the convolution.
    """

    kind: ClassVar[str] = "short_conv"
    float32_states: ClassVar[frozenset[str]] = frozenset()
    conv: int  # taps of the convolution
    bias: bool = False  # of both products and of the convolution

    def tensors(self) -> Shapes:
        shapes: Shapes = {
            "in_proj.weight": (3 * self.hidden, self.hidden),
            "conv1d.weight": (self.hidden, 1, self.conv),
            "out_proj.weight": (self.hidden, self.hidden),
        }
        biases = {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items() if self.bias}
        return shapes | biases

    @property
    def token_flops(self) -> int:
        return 2 * self.hidden * self.conv

    @property
    def states(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return (("recurrent", (self.conv - 1, self.hidden)),)

    @property
    def draft_elements(self) -> int:
        return 2 * self.hidden

    @property
    def tail_elements(self) -> int:
        return self.hidden

    @property
    def transition(self) -> tuple[int, ...]:
        """A number of tokens: each moves the stored inputs up by one."""
        return (1,)
