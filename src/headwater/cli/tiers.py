"""`headwater tiers`: content of a store, its check, and its clearing. Needs no model and no server."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from headwater.cache_folder import own_folder
from headwater.cli.common import commands, show
from headwater.errors import ConfigError
from headwater.table import Table
from headwater.tiers.catalog import Catalog
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.names import ENTRIES, FINGERPRINT, RUN, SEGMENT, STATE, TAIL, fingerprint_name, read_key, tag_of
from headwater.tiers.part import CorruptPart, Sealer
from headwater.tiers.place import EXAMPLES, TierPlace
from headwater.tiers.store import Store

KINDS = {STATE: "states", RUN: "runs of KV", TAIL: "tails", SEGMENT: "segments", ENTRIES: "entries of the MTP head"}
UNKNOWN = "unknown"  # of a fingerprint, without the tier key

Place = Annotated[str, Argument(metavar="PLACE", help=f"A tier, as for `serve`: {EXAMPLES}.")]

group = typer.Typer(rich_markup_mode=None, help="Look at a store of states, KV and segments; check and clear it.")
commands.add_typer(group, name="tiers")


def opened(place: str) -> Store:
    """Open a store that exists. Raises ConfigError, StoreError."""
    tier = TierPlace.parse(place)
    if tier.kind == "disk" and not Path(tier.place).expanduser().is_dir():
        raise ConfigError(f"{tier.place!r} is not a folder")
    return tier.open()


KeyFile = Annotated[Path | None, Option(help="The servers' tier key. [default: in the cache folder]")]


@group.command()
def ls(place: Place, tier_key: KeyFile = None) -> None:
    """Print the parts of a store, their bytes and fingerprints."""
    store, file = opened(place), tier_key or own_folder() / "tier-key"
    sealer = Sealer(read_key(file)) if file.is_file() else None
    catalog = store.catalog()
    stranded = set(catalog.stranded())
    table = Table(store.shown, ("kind",), ("parts", "bytes", "needed by no state"))
    for kind, shown in KINDS.items():
        sizes = {name: entry.bytes for name, entry in catalog.entries.items() if name.startswith(kind)}
        table.add_row(shown, f"{len(sizes):,}", f"{sum(sizes.values()):,}", f"{len(stranded & sizes.keys()):,}")
    show(table, _fingerprints(store, catalog, sealer))


def _fingerprints(store: Store, catalog: Catalog, sealer: Sealer | None) -> Table:
    """Return a table of fingerprints, the last used first: a server finds only the parts of its own."""
    used, size = dict[str, float](), Counter[str]()
    for name, entry in catalog.entries.items():
        if not name.startswith(FINGERPRINT):
            tag = tag_of(name)
            used[tag] = max(used.get(tag, 0.0), entry.used)
            size[tag] += entry.bytes
    table = Table("Fingerprints", ("fingerprint",), ("states", "bytes"), ("model", "other than in the first"))
    known = {tag: _fingerprint(store, tag, sealer) for tag in sorted(used, key=lambda tag: -used[tag])}
    first = next(iter(known.values()), None)
    for tag, found in known.items():
        differs = UNKNOWN if found is None or first is None else ", ".join(first.differs(found))
        model = UNKNOWN if found is None else found.model
        table.add_row(tag, f"{catalog.states[tag]:,}", f"{size[tag]:,}", model, differs)
    return table


def _fingerprint(store: Store, tag: str, sealer: Sealer | None) -> Fingerprint | None:
    """Read a fingerprint; None if it is not there, or was not stored with this key."""
    name = fingerprint_name(tag)
    content = None if sealer is None else store.get(name)
    if sealer is None or content is None:
        return None
    try:
        return Fingerprint.read(sealer.unseal(name, content))
    except CorruptPart:
        return None


@group.command()
def verify(
    place: Place,
    tier_key: KeyFile = None,
    delete: Annotated[bool, Option("--delete", help="Delete corrupt parts.")] = False,
) -> None:
    """Check every part with the tier key; exit code 1 if one is corrupt."""
    file = tier_key or own_folder() / "tier-key"
    if not file.is_file():
        raise ConfigError(f"{str(file)!r} has no tier key: give --tier-key")
    store, sealer = opened(place), Sealer(read_key(file))
    whole, corrupt = 0, dict[str, str]()
    for name in store.catalog().entries:
        content = store.get(name)
        if content is None:
            continue
        try:
            sealer.unseal(name, content)
            whole += 1
        except CorruptPart as error:
            corrupt[name] = str(error)
    if corrupt and not whole:
        raise ConfigError(
            f"none of {len(corrupt):,} parts was stored with the key in {str(file)!r}: is it the servers'?"
        )
    for name, why in corrupt.items():
        print(f"{name}: {why}")
    if delete:
        store.delete(list(corrupt))
    print(f"{whole:,} parts are whole, {len(corrupt):,} are not{' and were deleted' if delete and corrupt else ''}")
    if corrupt:
        raise typer.Exit(1)


@group.command()
def gc(place: Place) -> None:
    """Delete KV that no state needs, and empty fingerprints."""
    store = opened(place)
    stranded = store.catalog().stranded()
    store.delete(stranded)
    print(f"{len(stranded):,} parts were deleted")


@group.command()
def clear(place: Place, yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False) -> None:
    """Delete all parts of a store."""
    store = opened(place)
    names = list(store.catalog().entries)
    if not (yes or typer.confirm(f"Delete {len(names):,} parts of {store.shown}?")):
        raise typer.Exit(1)
    store.delete(names)
    print(f"{len(names):,} parts were deleted")
