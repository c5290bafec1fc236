"""Scalings of rotary frequencies, with which a model serves longer sequences than those of its training.

All of them are fixed when a model is loaded: a token's angles depend on its position only, so a prefix is reusable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Linear:
    """All frequencies divided by `factor`, as if positions were (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Divided:
    """Each frequency divided by a number of its own (LongRoPE, arXiv 2402.13753; `rope_freqs` of a GGUF file)."""

    divisors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Llama3:
    """Long wavelengths divided by `factor`, short ones kept, and a blend between them (Llama 3.1).

    Wavelengths are compared with the length of the training divided by `low` and by `high`.
    """

    factor: float
    low: float
    high: float
    trained: int  # tokens


@dataclass(frozen=True, slots=True)
class Yarn:
    """Slow frequencies divided by `factor`, fast ones kept, and a ramp between them (YaRN, arXiv 2309.00071).

    The ramp runs from the pair that turns `fast` times within the length of the training to the one with `slow` turns;
    `truncate` rounds its ends to whole pairs, outwards.
    """

    factor: float
    trained: int  # tokens
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True


def mscale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's growth of cosines and sines with a factor (section 3.4); `weight` as in DeepSeek-V2."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class Proportional:
    """The first `rotated` frequencies divided by `factor`, and 0 for the others, whose channels stay (Gemma 4)."""

    rotated: int
    factor: float = 1.0


Scaling = Linear | Divided | Llama3 | Yarn | Proportional
