"""Figures of a fidelity study, and their tables: distances of composed prompts from the same prompts computed whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from headwater.table import Table

NONE = "–"


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance of one tensor from another (HYPIC, table 4)."""

    error: float  # ‖composed − whole‖ / ‖whole‖, Frobenius norms
    degrees: float  # the angle between them

    @classmethod
    def mean(cls, distances: Sequence[Distance]) -> Distance:
        return cls(fmean(one.error for one in distances), fmean(one.degrees for one in distances))


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one prompt, composed by one method."""

    tokens: int
    anew: int  # computed tokens
    divergence: float  # of the next token's distribution, KL(whole ‖ composed) in nats
    same_first: bool  # whether the most likely next token is the same
    states: Mapping[int, Distance]  # by recurrent layer, of the state after the last token
    # by attention layer, of keys and values (or latents) of reused tokens; for a window, of all tokens in it at the end
    kept: Mapping[int, Mapping[str, Distance]]


@dataclass(frozen=True, slots=True)
class Deviation:
    """Mean absolute difference of the attention that a key gets, over heads and the segments' queries, by its place.

    Attention sums to 1 over all keys of a query. A query of a segment computed apart attends to no other one.
    """

    head: float  # the first tokens of segments
    interior: float
    tail: float  # the last tokens of segments

    @classmethod
    def means(cls, found: Sequence[Mapping[int, Deviation]]) -> dict[int, Deviation]:
        """Return means by layer over prompts; a prompt without a segment that is long enough has no layers."""
        found = [one for one in found if one]
        places = ("head", "interior", "tail")
        return {
            layer: cls(*(fmean(getattr(one[layer], place) for one in found) for place in places))
            for layer in (found[0] if found else ())
        }


@dataclass(frozen=True, slots=True)
class MeanFidelity:
    """Means over prompts, each of which counts the same."""

    prompts: int
    anew: float  # share of computed tokens
    divergence: float  # nats
    same_first: float  # share of the prompts
    states: Mapping[int, Distance]  # by recurrent layer
    kept: Mapping[int, Mapping[str, Distance]]  # by attention layer, over prompts in which anything was reused

    @classmethod
    def of(cls, measured: Sequence[Measured]) -> MeanFidelity:
        """Average at least one prompt."""
        first, reusing = measured[0], [one for one in measured if one.anew < one.tokens] or measured
        return cls(
            prompts=len(measured),
            anew=sum(one.anew for one in measured) / sum(one.tokens for one in measured),
            divergence=fmean(one.divergence for one in measured),
            same_first=fmean(one.same_first for one in measured),
            states={layer: Distance.mean([one.states[layer] for one in measured]) for layer in first.states},
            kept={
                layer: {name: Distance.mean([one.kept[layer][name] for one in reusing]) for name in names}
                for layer, names in first.kept.items()
            },
        )


@dataclass(frozen=True)
class Study:
    """Results of a fidelity study."""

    model: str
    measured: Mapping[str, Sequence[Measured]]  # by method, of each prompt
    deviations: Mapping[int, Deviation]  # by attention layer, of independently computed segments

    @property
    def means(self) -> dict[str, MeanFidelity]:
        """Means over prompts by method."""
        return {method: MeanFidelity.of(found) for method, found in self.measured.items()}

    def as_json(self) -> dict[str, Any]:
        """Return the means and each prompt's figures."""
        return {
            "model": self.model,
            "ways": {
                method: {"mean": asdict(mean), "prompts": [asdict(one) for one in self.measured[method]]}
                for method, mean in self.means.items()
            },
            "attention": {layer: asdict(one) for layer, one in self.deviations.items()},
        }


def means_table(means: Mapping[str, MeanFidelity]) -> Table:
    """Return a row for each method of composing."""
    names = ("prompts", "computed", "KL, nats", "same first token", "last state")
    table = Table("composed against whole", ("method",), names)
    for name, one in means.items():
        *_, last = (None, *one.states.values())
        table.add_row(
            name, f"{one.prompts:,}", f"{one.anew:.1%}", f"{one.divergence:.4f}", f"{one.same_first:.1%}", _far(last)
        )
    return table


def states_table(means: Mapping[str, MeanFidelity]) -> Table:
    """Return relative error and angle of each recurrent layer's state after the last token."""
    table = Table("states after the last token: relative error, angle", ("layer",), list(means))
    for layer in next(iter(means.values())).states:
        table.add_row(str(layer), *(_far(one.states[layer]) for one in means.values()))
    return table


def kept_table(means: Mapping[str, MeanFidelity]) -> Table:
    """Return distances of keys and values of reused tokens; a method without reuse has no figures."""
    table = Table("keys and values of reused tokens: relative error, angle", ("layer",), list(means))
    for layer, names in next(iter(means.values())).kept.items():
        for name in names:
            shown = (_far(one.kept[layer][name] if one.anew < 1 else None) for one in means.values())
            table.add_row(f"{layer}, {name}", *shown)
    return table


def deviations_table(found: Mapping[int, Deviation], ends: int) -> Table:
    """Return the deviation of attention at the ends of segments, and its ratio to that of the interior."""
    names = ("head", "interior", "tail", "head/interior", "tail/interior")
    title = f"segments computed apart: deviation of attention by key, ends of {ends} tokens"
    table = Table(title, ("layer",), names)
    for layer, one in found.items():
        ratios = (f"{end / one.interior:.2f}" if one.interior else NONE for end in (one.head, one.tail))
        table.add_row(str(layer), f"{one.head:.2e}", f"{one.interior:.2e}", f"{one.tail:.2e}", *ratios)
    return table


def _far(one: Distance | None) -> str:
    return NONE if one is None else f"{one.error:.2e}, {one.degrees:.2f}°"
