"""What was measured of several prompts, as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from headwater.evaluate.fidelity.attention import Deviation
from headwater.evaluate.fidelity.distance import Distance, Measured


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over prompts, each of which counts the same."""

    prompts: int
    anew: float  # share of the tokens that were computed
    divergence: float  # nats
    same_first: float  # share of the prompts
    states: Mapping[int, Distance]  # by recurrent layer
    kept: Mapping[int, Mapping[str, Distance]]  # by attention layer, over prompts of which anything was reused

    @classmethod
    def of(cls, measured: Sequence[Measured]) -> Summary:
        """Of at least one."""
        first, reusing = measured[0], [one for one in measured if one.anew < one.tokens] or measured
        return cls(
            prompts=len(measured),
            anew=sum(one.anew for one in measured) / sum(one.tokens for one in measured),
            divergence=fmean(one.divergence for one in measured),
            same_first=fmean(one.same_first for one in measured),
            states={layer: mean_distance([one.states[layer] for one in measured]) for layer in first.states},
            kept={
                layer: {name: mean_distance([one.kept[layer][name] for one in reusing]) for name in names}
                for layer, names in first.kept.items()
            },
        )


def mean_distance(distances: Sequence[Distance]) -> Distance:
    return Distance(fmean(one.error for one in distances), fmean(one.degrees for one in distances))


def mean_deviations(found: Sequence[Mapping[int, Deviation]]) -> dict[int, Deviation]:
    """By layer, over prompts; those that had no segment that was long enough are left out."""
    found = [one for one in found if one]
    return {
        layer: Deviation(
            *(fmean(getattr(one[layer], place) for one in found) for place in ("head", "interior", "tail"))
        )
        for layer in (found[0] if found else ())
    }
