"""Fidelity for readers."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from headwater.evaluate.fidelity.attention import Deviation
from headwater.evaluate.fidelity.distance import Distance
from headwater.evaluate.fidelity.summary import Summary


def ways_table(ways: Mapping[str, Summary]) -> Table:
    """A row for each way of composing."""
    table = _table("composed against whole", "way", "prompts", "computed", "KL, nats", "same first token", "last state")
    for name, one in ways.items():
        *_, last = (None, *one.states.values())
        table.add_row(
            name, f"{one.prompts:,}", f"{one.anew:.1%}", f"{one.divergence:.4f}", f"{one.same_first:.1%}", _shown(last)
        )
    return table


def states_table(ways: Mapping[str, Summary]) -> Table:
    """Each recurrent layer's state after the last token: relative error and angle."""
    table = _table("states after the last token: relative error, angle", "layer", *ways)
    for layer in next(iter(ways.values())).states:
        table.add_row(str(layer), *(_shown(one.states[layer]) for one in ways.values()))
    return table


def kept_table(ways: Mapping[str, Summary]) -> Table:
    """What each attention layer keeps of reused tokens, likewise; nothing of a way that reused none."""
    table = _table("keys and values of reused tokens: relative error, angle", "layer", *ways)
    for layer, names in next(iter(ways.values())).kept.items():
        for name in names:
            shown = (_shown(one.kept[layer][name] if one.anew < 1 else None) for one in ways.values())
            table.add_row(f"{layer}, {name}", *shown)
    return table


def deviations_table(found: Mapping[int, Deviation], ends: int) -> Table:
    """Attention's deviation at the ends of segments, and how many times the interior's that is."""
    title = f"segments computed alone: deviation of attention a key, ends of {ends} tokens"
    table = _table(title, "layer", "head", "interior", "tail", "head/interior", "tail/interior")
    for layer, one in found.items():
        ratios = (f"{end / one.interior:.2f}" if one.interior else "-" for end in (one.head, one.tail))
        table.add_row(str(layer), f"{one.head:.2e}", f"{one.interior:.2e}", f"{one.tail:.2e}", *ratios)
    return table


def _shown(one: Distance | None) -> str:
    return "–" if one is None else f"{one.error:.2e}, {one.degrees:.2f}°"


def _table(title: str, label: str, *numbers: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(label, no_wrap=True)
    for number in numbers:
        table.add_column(number, justify="right", overflow="fold")
    return table
