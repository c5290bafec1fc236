"""`headwater profiles`: models that the lab knows, and their costs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from headwater.cli.common import commands, figures_table, show
from headwater.cli.inspect import INSPECTED_LENGTHS
from headwater.models.profiles import PROFILES, Profile, load_profile


@commands.command()
def profiles(
    names: Annotated[list[str] | None, typer.Argument(help="Show only these, in detail.")] = None,
    sources: Annotated[
        bool, typer.Option("--sources", help="Show the source of each, and what it leaves open.")
    ] = False,
) -> None:
    """List the models that the lab knows by name.

    A checkpoint's folder is a profile, too.
    """
    chosen = [load_profile(name) for name in names] if names else list(PROFILES.values())
    show(sources_table(chosen) if sources else sizes_table(chosen))
    for profile in chosen if names and not sources else ():
        show(layers_table(profile), flops_table(profile))


def sizes_table(chosen: list[Profile]) -> Table:
    numbers = ("parameters", "attention", "recurrent", "KV a token", "checkpoint", "= tokens of KV", "GFLOPs a token")
    table = figures_table(None, "profile", *numbers)
    for profile in chosen:
        kv, attention = profile.kv_bytes_per_token, sum(n for layer, n in profile.layers if layer.kv_elements(1))
        table.add_row(
            profile.name,
            f"{sum(profile.parameters_by_kind().values()) / 1e9:.2f} B",
            f"{attention:,}",
            f"{sum(n for layer, n in profile.layers if layer.states):,}",
            f"{kv:,}",
            f"{profile.checkpoint_bytes:,}",
            f"{profile.checkpoint_bytes / kv:,.0f}" if kv else "",
            f"{profile.flops.linear / 1e9:.2f}",
        )
    return table


def sources_table(chosen: list[Profile]) -> Table:
    table = Table("profile", "source", "note")
    for profile in chosen:
        table.add_row(profile.name, profile.source, profile.note)
    return table


def layers_table(profile: Profile) -> Table:
    """Return a row for each kind of layer: their number, and the sizes and costs of one of them."""
    numbers = ("layers", "weights of each", "KV a token, elements", "state, elements", "MFLOPs a token")
    table = figures_table(f"{profile.name}: layers", "kind", *numbers)
    for layer, n in profile.layers:
        state = sum(layer.state_elements.values())
        kv = layer.kv_elements(profile.tensor_parallel)
        table.add_row(
            layer.kind, f"{n:,}", f"{layer.weights:,}", f"{kv:,}", f"{state:,}", f"{layer.flops.linear / 1e6:,.1f}"
        )
    return table


def flops_table(profile: Profile) -> Table:
    """Return FLOPs of one more token after each length, and of the prefill that a hit of that length saves."""
    numbers = ("one more token", "that grow with the length", "saved by a hit")
    table = figures_table(f"{profile.name}: FLOPs", "after tokens", *numbers)
    for length in INSPECTED_LENGTHS:
        total = profile.flops.between(length, length + 1)
        share = 1 - profile.flops.linear / total
        saved = profile.flops.between(0, length)
        table.add_row(f"{length:,}", f"{total / 1e9:,.3f} G", f"{share:.0%}", f"{saved / 1e12:,.2f} T")
    return table
