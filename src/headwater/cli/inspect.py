"""Costs of models and devices: `headwater fit`, `headwater inspect` and `headwater profiles`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer
from typer import Option

from headwater.cli.common import Dtype, Memory, Model, PageSize, Weights, commands, one_of, prepare_outputs, show
from headwater.cli.models import any_profile, config_folder, named
from headwater.config import WEIGHTS, ServeConfig
from headwater.lab.cost import DEVICES, load_device
from headwater.lab.fit import NAMES, Fitted, fit, observe, read_points
from headwater.models.dtype import choose_dtype
from headwater.models.families import read_folder
from headwater.models.files import model_config
from headwater.models.profiles import PROFILES, Profile
from headwater.setting import parse_bytes
from headwater.spec import ModelSpec
from headwater.table import Table

INSPECTED_LENGTHS = (0, 1024, 8192, 32768, 131072)  # tokens
SHOWN_OBSERVATIONS = 12  # observations of the table of residuals


@commands.command("fit")
def fit_device(
    points: Annotated[list[Path], typer.Argument(help="JSON of `headwater bench serve --json`, or a list of points.")],
    model: Annotated[str, Option(help="Measured model: a profile, a folder, or ORG/NAME.")],
    device: Annotated[str, Option(help=f"Device whose peaks hold: {', '.join(DEVICES)}, or a file.")] = "cpu",
    out: Annotated[Path | None, Option(help="Write the device to this file, for `replay --serve`.")] = None,
    tokens_per_step: Annotated[int, Option(min=1, help="Tokens of a step of the measured engine.")] = 1024,
    tensor_parallel: Annotated[int, Option(min=1, help="Devices that shared the model.")] = 1,
    weights: Weights = "auto",
) -> None:
    """Fit the cost model of a device to measured requests.

    Each request must have been the only one on the engine.
    """
    prepare_outputs(out)
    one_of("weights", weights, WEIGHTS)
    profile = replace(any_profile(model, weights), tensor_parallel=tensor_parallel)
    base = load_device(device)
    files = [read_points(path) for path in points]
    measured, left_out = [point for found, _ in files for point in found], sum(count for _, count in files)
    fitted = fit(profile, base, observe(measured, tokens_per_step))
    show(f"{len(measured):,} requests; {left_out:,} left out that failed or ran with others")
    show(parameters_table(fitted), residuals_table(fitted))
    if out is not None:
        source = f"fitted to {len(measured):,} requests of {profile.name}, R² {fitted.r2:.4f}; peaks of {base.name}"
        out.write_text(replace(fitted.device, name=out.stem, source=source).as_toml(), encoding="utf-8")
        show(f"written to {out}")


def parameters_table(fitted: Fitted) -> Table:
    table = Table(f"R² {fitted.r2:.4f}", ("parameter",), ("value", "standard error"))
    for name, deviation in zip(NAMES, fitted.deviations, strict=True):
        value = getattr(fitted.device, name)
        shown, error = (f"{1000 * x:.3f} ms" if name == "overhead" else f"{x:.4f}" for x in (value, deviation))
        table.add_row(name.replace("_", " "), shown, "not determined" if name in fitted.kept else error)
    return table


def residuals_table(fitted: Fitted) -> Table:
    """Return some observations, from the shortest to the longest, and the median of all errors."""
    errors = fitted.errors
    names = ("prompt", "cached", "measured ms", "predicted ms", "error")
    table = Table(f"median error {fitted.median_error:.1%}", ("",), names)
    order = sorted(range(len(errors)), key=lambda at: fitted.observations[at].seconds)
    n = min(SHOWN_OBSERVATIONS, len(order))
    for at in (order[round(i * (len(order) - 1) / (n - 1))] for i in range(n)):
        one = fitted.observations[at]
        table.add_row(
            one.what, f"{one.point.prompt_tokens:,}", f"{one.point.cached_tokens:,}", f"{1000 * one.seconds:,.2f}",
            f"{1000 * fitted.predicted[at]:,.2f}", f"{errors[at]:+.1%}",
        )  # fmt: skip
    return table


@commands.command()
def inspect(
    model: Model = None,
    memory: Memory = "4GB",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    page_size: PageSize = 64,
) -> None:
    """Print the costs of a model's cache, without loading its weights.

    For ORG/NAME only its config.json is downloaded. A profile has only the sizes that the lab knows.
    """
    if str(model) in PROFILES:
        profiles([str(model)])
        return
    folder = config_folder(named(model))
    spec = read_spec(folder, dtype, page_size, weights)
    budget = parse_bytes(memory)
    n_pages = spec.layout(budget).n_pages
    capacity = Table(None, (f"capacity of {budget:,} bytes",), ("if only that",))
    capacity.add_row("tokens of KV", f"{n_pages * page_size:,}" if spec.attention_layers else "any number")
    takes_pages = spec.checkpoint_pages and not spec.states_in_pages
    capacity.add_row("checkpoints", f"{n_pages // spec.checkpoint_pages:,}" if takes_pages else "none needed")
    reason = choose_dtype(model_config(folder), dtype).reason
    show(f"computed in {spec.dtype_name}: {reason}", cost_table(spec), flops_table(spec), capacity)


def read_spec(path: Path, dtype: str, page_size: int, weights: str = "auto") -> ModelSpec:
    """Read the sizes of a checkpoint's model; dtype `auto` is the one that `serve` chooses on this machine's CPU."""
    ServeConfig(model=path, dtype=dtype, weights=weights, page_size=page_size)  # checks the four
    return read_folder(path, choose_dtype(model_config(path), dtype).name, page_size, weights)


def cost_table(spec: ModelSpec) -> Table:
    layers = ", ".join(f"{n} {kind}" for kind, n in spec.layers_by_kind.items())
    table = Table(f"{spec.model_type}, {spec.dtype_name}: {layers}", ("",), ("bytes",), ("equals",))
    table.add_row(f"weights, {spec.weights_held}", f"{spec.weight_bytes:,}", "")
    table.add_row("KV of a token", f"{spec.kv_bytes_per_token:,}", "")
    table.add_row(f"a page ({spec.page_size} tokens)", f"{spec.page_bytes:,}", "")
    in_tokens = f"{spec.checkpoint_bytes / spec.kv_bytes_per_token:,.0f} tokens of KV" if spec.attention_layers else ""
    pages = "in each page" if spec.states_in_pages else f"{spec.checkpoint_pages:,} pages"
    table.add_row("a checkpoint", f"{spec.checkpoint_bytes:,}", f"{in_tokens}; {pages}" if in_tokens else pages)
    tail_bytes = spec.tail_bytes(spec.page_size - 1, spec.page_size)
    share = f"{tail_bytes / spec.checkpoint_bytes:.0%} of a checkpoint; " if spec.checkpoint_bytes else ""
    table.add_row(
        f"a tail ({spec.page_size - 1} tokens)", f"{tail_bytes:,}", f"{share}{tail_bytes // spec.page_bytes:,} pages"
    )
    for kind, n_bytes in spec.tail.bytes_by_kind(spec.page_size - 1).items():
        table.add_row(f"its {kind}", f"{n_bytes:,}", f"{n_bytes / tail_bytes:.0%} of it")
    if spec.draft_bytes:
        share = f"1/{spec.checkpoint_bytes / spec.draft_bytes:,.0f} of a checkpoint"
        table.add_row("kept of a draft", f"{spec.draft_bytes:,}", share)
    if spec.mtp is not None:
        table.add_row(
            "MTP head, a page", f"{spec.mtp_page_bytes:,}", f"{spec.mtp_page_bytes / spec.page_bytes:.0%} of a page"
        )
    return table


def flops_table(spec: ModelSpec) -> Table:
    """Return FLOPs of one more token after each length, and of the prefill that a hit of that length saves."""
    table = Table("FLOPs", ("after tokens",), ("one more token", "share of attention", "saved by a hit"))
    attention = {spec.layers[i].kind for i in spec.attention_layers}
    for length in (n for n in INSPECTED_LENGTHS if n < spec.max_length):
        kinds = spec.flops_by_kind(length, length + 1)
        total = sum(kinds.values()) - kinds["head"]
        saved = spec.prefill_flops(0, length) - spec.flops_by_kind(0, length)["head"]
        share = f"{sum(kinds[kind] for kind in attention) / total:.0%}"
        table.add_row(f"{length:,}", f"{total / 1e6:,.1f} M", share, f"{saved / 1e9:,.2f} G")
    return table


PROFILE_NAMES = fill(", ".join(PROFILES), 76, break_on_hyphens=False)


@commands.command(epilog=f"\b\nProfiles:\n{PROFILE_NAMES}")
def profiles(
    names: Annotated[list[str] | None, typer.Argument(help="Show only these, in detail.")] = None,
    sources: Annotated[bool, Option("--sources", help="Show the source of each, and what it leaves open.")] = False,
) -> None:
    """List the models that the lab knows by name.

    A checkpoint's folder is a profile, too, and so is ORG/NAME.
    """
    chosen = [any_profile(name) for name in names] if names else list(PROFILES.values())
    show(sources_table(chosen) if sources else sizes_table(chosen))
    for profile in chosen if names and not sources else ():
        show(layers_table(profile), profile_flops_table(profile))


def sizes_table(chosen: list[Profile]) -> Table:
    numbers = ("parameters", "attention", "recurrent", "KV a token", "checkpoint", "= tokens of KV", "GFLOPs a token")
    table = Table(None, ("profile",), (*numbers, "dtype", "weights"))
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
            profile.dtype_name,
            profile.weights_held,
        )
    return table


def sources_table(chosen: list[Profile]) -> Table:
    table = Table(None, ("profile",), words=("source", "note"))
    for profile in chosen:
        table.add_row(profile.name, profile.source, profile.note)
    return table


def layers_table(profile: Profile) -> Table:
    """Return a row for each kind of layer: their number, and the sizes and costs of one of them."""
    numbers = ("layers", "weights of each", "KV a token, elements", "state, elements", "MFLOPs a token")
    table = Table(f"{profile.name}: layers", ("kind",), numbers)
    for layer, n in profile.layers:
        state = sum(layer.state_elements.values())
        kv = layer.kv_elements(profile.tensor_parallel)
        flops = f"{layer.flops.linear / 1e6:,.1f}"
        table.add_row(layer.kind, f"{n:,}", f"{layer.weights:,}", f"{kv:,}", f"{state:,}", flops)
    return table


def profile_flops_table(profile: Profile) -> Table:
    """Return FLOPs of one more token after each length, and of the prefill that a hit of that length saves."""
    numbers = ("one more token", "that grow with the length", "saved by a hit")
    table = Table(f"{profile.name}: FLOPs", ("after tokens",), numbers)
    for length in INSPECTED_LENGTHS:
        total = profile.flops.between(length, length + 1)
        share = 1 - profile.flops.linear / total
        saved = profile.flops.between(0, length)
        table.add_row(f"{length:,}", f"{total / 1e9:,.3f} G", f"{share:.0%}", f"{saved / 1e12:,.2f} T")
    return table
