"""`headwater models`: the models in huggingface_hub's cache, and those that fit this machine."""

from __future__ import annotations

import os
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Annotated

import typer

from headwater import machine
from headwater.cache_folder import cache_folder
from headwater.cli.common import commands, show
from headwater.cli.models import by_name, whole_folder
from headwater.errors import ConfigError
from headwater.hub_name import HubName
from headwater.models.hub import cached, cached_config
from headwater.models.published import MODELS, fitting
from headwater.table import Table

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

Name = Annotated[str, typer.Argument(metavar="ORG/NAME", help="A model's name on the hub.")]

group = typer.Typer(
    rich_markup_mode=None, invoke_without_command=True, help="List downloaded models and those that fit; pull, rm."
)
commands.add_typer(group, name="models")


@group.callback()
def models(context: typer.Context) -> None:
    """List the downloaded models with their sizes, and which of ten much-run hybrids fit this machine.

    A downloaded model is `complete` if `headwater serve` needs no other file.
    """
    if context.invoked_subcommand is not None:
        return
    from huggingface_hub import constants

    found = downloaded()
    table = Table("downloaded models", ("model",), ("size, GB",), ("state",))
    for repository, size in sorted(found.items()):
        table.add_row(repository, f"{size / 1e9:,.2f}", state_of(HubName(repository)))
    show(table if found else "no model is downloaded", f"in {constants.HF_HUB_CACHE}")
    converted = cache_folder(os.environ) / "weights"
    n_bytes = sum(path.stat().st_size for path in converted.rglob("*") if path.is_file())
    show(f"converted weights (int8, int4): {n_bytes / 1e9:,.2f} GB", f"in {converted}", "")
    show(fitting_table(machine_memory()), "headwater serve ORG/NAME FLAGS downloads and serves a model")


@group.command()
def pull(name: Name) -> None:
    """Download a model, or its missing files."""
    show(f"{name} is complete", f"in {whole_folder(named_on_hub(name))}")


@group.command()
def rm(name: Name) -> None:
    """Remove a downloaded model, whose name must be exact, with all of its revisions."""
    cache = scanned()
    chosen = [one for one in cache.repos if (one.repo_type, one.repo_id) == ("model", name)] if cache else []
    if not chosen:
        raise ConfigError(f"{name} is not downloaded: `headwater models` lists the names")
    rmtree(chosen[0].repo_path)
    show(f"{name}: {chosen[0].size_on_disk / 1e9:,.2f} GB removed")


def named_on_hub(name: str) -> HubName:
    """Return a model's name. Raises ConfigError for a text that is none."""
    found = by_name(Path(name))
    if not isinstance(found, HubName):
        raise ConfigError(f"{name!r} is not a model's name on the hub, such as {MODELS[1].folder}")
    return found


def scanned() -> HFCacheInfo | None:
    """Return the content of huggingface_hub's cache; None if it has no folder."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def downloaded() -> dict[str, int]:
    """Return the bytes on disk of each model in the cache."""
    cache = scanned()
    return {one.repo_id: one.size_on_disk for one in cache.repos if one.repo_type == "model"} if cache else {}


def state_of(name: HubName) -> str:
    """Return whether the cache has all files that a model needs."""
    if cached_config(name) is None:
        return "no model, or another revision"
    return "complete" if cached(name) else "incomplete: pull continues"


def machine_memory() -> int:
    """Return the bytes of memory that a process may use here."""
    found = (machine.meminfo("MemTotal"), machine.memory_limit(), machine.UNKNOWN)
    return min(value for value in found if value is not None)


def fitting_table(memory: int) -> Table:
    """Return the ten models with the flags by which each fits into the memory, the smallest first."""
    title = f"much-run hybrids in {machine.in_units(memory)} of memory, for 32,768 tokens or more"
    table = Table(title, ("model",), ("download, GB", "needs, GB"), ("flags",))
    rows = [(one.folder, *fitting(one, memory)) for one in MODELS]
    for repository, found, fits in sorted(rows, key=lambda row: (not row[2], row[1].download)):
        flags = " ".join(found.flags) or "none"
        sizes = f"{found.download / 1e9:,.1f}", f"{found.needed / 1e9:,.1f}"
        table.add_row(repository, *sizes, flags if fits else "too large")
    return table
