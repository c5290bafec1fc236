"""Frequencies of a rotation in float32: the one place that computes them, for kernels of every device.

Formulas and the order of operations are those of transformers' `modeling_rope_utils.py`. F rotated pairs of channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwater.layers.attention import Rotary
from headwater.layers.rotary_scaling import Divided, Linear, Llama3, Proportional, Yarn


def frequencies(rotary: Rotary) -> Tensor:
    """Return the radians by which each pair of channels turns from one position to the next, [F] on the CPU."""
    period_F = rotary.theta ** (torch.arange(0, rotary.dim, 2, dtype=torch.float) / rotary.dim)
    match rotary.scaling:
        case Divided(divisors):
            return 1.0 / (torch.tensor(divisors) * period_F)
        case Linear(factor):
            return 1.0 / period_F / factor
        case Llama3():
            return _of_llama3(1.0 / period_F, rotary.scaling)
        case Yarn():
            return _of_yarn(period_F, rotary, rotary.scaling)
        case Proportional(rotated, factor):
            turns_F = torch.arange(len(period_F)) < rotated
            return torch.where(turns_F, 1.0 / period_F / factor, 0.0)
    return 1.0 / period_F


def _of_llama3(frequency_F: Tensor, scaling: Llama3) -> Tensor:
    wave_F = 2 * math.pi / frequency_F
    longest, shortest = scaling.trained / scaling.low, scaling.trained / scaling.high
    kept_F = (scaling.trained / wave_F - scaling.low) / (scaling.high - scaling.low)
    blended_F = (1 - kept_F) * frequency_F / scaling.factor + kept_F * frequency_F
    short_F = torch.where(wave_F < shortest, frequency_F, blended_F)
    return torch.where(wave_F > longest, frequency_F / scaling.factor, short_F)


def _of_yarn(period_F: Tensor, rotary: Rotary, scaling: Yarn) -> Tensor:
    def pair(turns: float) -> float:
        """Return the number of the pair that turns so often within the length of the training."""
        return rotary.dim * math.log(scaling.trained / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))

    low, high = pair(scaling.fast), pair(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    width = high - low or 0.001
    kept_F = 1 - ((torch.arange(len(period_F), dtype=torch.float) - low) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * period_F) * (1 - kept_F) + 1.0 / period_F * kept_F
