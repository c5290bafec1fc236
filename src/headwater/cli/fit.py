"""`headwater fit`: efficiencies of an engine on its device, fitted to measured times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from headwater.cli.common import commands, console
from headwater.lab.cost import DEVICES, load_device
from headwater.lab.fit import NAMES, Fitted, fit, observe, read_points
from headwater.models.profiles import load_profile

SHOWN = 12  # observations of the table of residuals


@commands.command("fit")
def fit_device(
    points: Annotated[list[Path], typer.Argument(help="JSON of `headwater bench serve --json`, or a list of points.")],
    model: Annotated[str, typer.Option(help="Measured model: a profile's name or a checkpoint's folder.")],
    device: Annotated[str, typer.Option(help=f"Device whose peaks hold: {', '.join(DEVICES)}, or a file.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Write the device to this file, for `replay --serve`.")] = None,
    tokens_per_step: Annotated[int, typer.Option(min=1, help="Tokens of a step of the measured engine.")] = 1024,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices that shared the model.")] = 1,
) -> None:
    """Fit the cost model of a device to measured requests.

    Each request must have been alone on the engine.
    """
    profile, base = replace(load_profile(model), tensor_parallel=tensor_parallel), load_device(device)
    files = [read_points(path) for path in points]
    measured, left_out = [point for found, _ in files for point in found], sum(count for _, count in files)
    fitted = fit(profile, base, observe(measured, tokens_per_step))
    console.print(f"{len(measured):,} requests; {left_out:,} left out that failed or were not alone")
    console.print(parameters_table(fitted))
    console.print(residuals_table(fitted))
    if out is not None:
        source = f"fitted to {len(measured):,} requests of {profile.name}, R² {fitted.r2:.4f}; peaks of {base.name}"
        out.write_text(replace(fitted.device, name=out.stem, source=source).as_toml())
        console.print(f"written to {out}", highlight=False)


def parameters_table(fitted: Fitted) -> Table:
    table = Table(title=f"R² {fitted.r2:.4f}", title_justify="left")
    for name in ("parameter", "value", "standard error"):
        table.add_column(name, justify="left" if name == "parameter" else "right", no_wrap=True)
    for name, deviation in zip(NAMES, fitted.deviations, strict=True):
        value = getattr(fitted.device, name)
        shown, error = (f"{1000 * value:.3f} ms", f"{1000 * deviation:.3f} ms") if name == "overhead" else (
            f"{value:.4f}", f"{deviation:.4f}"
        )  # fmt: skip
        table.add_row(name.replace("_", " "), shown, "not determined" if name in fitted.kept else error)
    return table


def residuals_table(fitted: Fitted) -> Table:
    """Return some observations, from the shortest to the longest, and the median of all errors."""
    errors = fitted.errors
    table = Table(title=f"median error {fitted.median_error:.1%}", title_justify="left")
    for name in ("", "prompt", "cached", "measured ms", "predicted ms", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    order = sorted(range(len(errors)), key=lambda at: fitted.observations[at].seconds)
    n = min(SHOWN, len(order))
    for at in (order[round(i * (len(order) - 1) / (n - 1))] for i in range(n)):
        one = fitted.observations[at]
        table.add_row(
            one.what, f"{one.point.prompt_tokens:,}", f"{one.point.cached_tokens:,}", f"{1000 * one.seconds:,.2f}",
            f"{1000 * fitted.predicted[at]:,.2f}", f"{errors[at]:+.1%}",
        )  # fmt: skip
    return table
