"""From samples to the whole: the model's hit rate, corrected by how cache and model differ on the samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t of 1 degree of freedom and more, two-sided 95%; beyond, 1.96 + 2.4 / degrees is within 2%.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sample at one size, in tokens."""

    prompt: int
    hit: int  # by the cache
    modelled: int


@dataclass(frozen=True, slots=True)
class Estimate:
    hit_rate: float
    error: float  # half the 95% interval
    correction: float  # what the samples added to the model


def estimate(modelled: float, samples: Sequence[Sampled], parts: int) -> Estimate:
    """A ratio estimate over samples of unequal length, out of `parts` (Cochran, Sampling Techniques, chapter 6)."""
    prompts = sum(one.prompt for one in samples)
    correction = sum(one.hit - one.modelled for one in samples) / max(1, prompts)
    left = [one.hit - one.modelled - correction * one.prompt for one in samples]
    mean = max(1.0, statistics.fmean(one.prompt for one in samples))
    spread = math.sqrt(sum(value**2 for value in left) / (len(left) - 1) / len(left)) / mean
    unseen = max(0.0, 1 - len(samples) / parts)
    hit_rate = min(1.0, max(0.0, modelled + correction))
    return Estimate(hit_rate, student(len(left) - 1) * spread * math.sqrt(unseen), correction)


def student(degrees: int) -> float:
    return T[degrees - 1] if degrees <= len(T) else 1.96 + 2.4 / degrees
