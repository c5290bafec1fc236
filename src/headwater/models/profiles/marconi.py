"""Marconi's models (Pan et al. 2025, table 1 and section 5): the paper's formulas, not any real family's shapes.

Its SSM formulas are those of the published simulator, which differs from the table in two terms: 10LD operations
where the table prints 10L, and a convolution's state of 8(2D + 2N) bytes, which the table leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headwater.layers.layer import Layer, Shapes
from headwater.models.profiles.profile import Profile
from headwater.plan import PrefillFlops

SOURCE = "Marconi (arXiv 2411.19379), table 1, appendix A"
WIDTH = 4096
STATE = 128
ATTENTION, SSM, MLP = 4, 24, 28  # layers of the 7B hybrid
RATIOS = {"1to8": (4, 32), "1to6": (5, 30), "1to4": (7, 28), "1to2": (12, 24), "attention": (36, 0), "ssm": (0, 36)}
STATE_SIZES = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class FullAttention(Layer):
    """8LD² + 4L²D FLOPs, 2LD elements of KV: every head has keys and values of its own."""

    kind: ClassVar[str] = "attention"

    def tensors(self) -> Shapes:
        return {"qkvo.weight": (4 * self.hidden, self.hidden)}

    @property
    def flops(self) -> PrefillFlops:
        return PrefillFlops(8 * self.hidden**2, 4 * self.hidden)

    @property
    def kv_widths(self) -> tuple[int, ...]:
        return (self.hidden, self.hidden)


@dataclass(frozen=True, slots=True)
class PlainMlp(Layer):
    """16LD² FLOPs: up to four times the width, and down again."""

    kind: ClassVar[str] = "mlp"

    def tensors(self) -> Shapes:
        return {"up_down.weight": (8 * self.hidden, self.hidden)}

    @property
    def flops(self) -> PrefillFlops:
        return PrefillFlops(2 * self.weights, 0)


@dataclass(frozen=True, slots=True)
class Ssm(Layer):
    """12LD² + 16LDN + 10LD FLOPs; DN elements of state, and four taps of a convolution over 2D + 2N channels."""

    kind: ClassVar[str] = "ssm"
    state: int

    def tensors(self) -> Shapes:
        return {"in_out.weight": (6 * self.hidden, self.hidden)}

    @property
    def flops(self) -> PrefillFlops:
        return PrefillFlops(2 * self.weights + 16 * self.hidden * self.state + 10 * self.hidden, 0)

    @property
    def states(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ("recurrent", (self.hidden, self.state)), ("conv", (2 * self.hidden + 2 * self.state, 4))

    @property
    def tail_elements(self) -> int:
        return 2 * self.hidden + 2 * self.state

    @property
    def composes(self) -> bool:
        """The paper's formulas name no transition."""
        return False


def marconi(name: str, attention: int, ssm: int, state: int = STATE, note: str = "") -> Profile:
    """A model of the paper's layers, in float16 throughout; embedding and head are not counted."""
    layers = ((FullAttention(WIDTH), attention), (Ssm(WIDTH, state), ssm), (PlainMlp(WIDTH), MLP))
    dtypes = dict.fromkeys(("dtype_name", "weight_dtype", "state_dtype"), "float16")
    return Profile.of(name, SOURCE, 0, *(layer for layer in layers if layer[1]), **dtypes, note=note)


RATIO_NOTE = "attention and SSM layers of figure 12a; the number of MLPs is not given there and is left at 28"
MODELS = (
    marconi("marconi-7b", ATTENTION, SSM),
    *(marconi(f"marconi-7b-{name}", *counts, note=RATIO_NOTE) for name, counts in RATIOS.items()),
    *(marconi(f"marconi-7b-n{size}", ATTENTION, SSM, size, "state size of figure 12b") for size in STATE_SIZES),
)
