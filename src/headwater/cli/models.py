"""Models that a command line names: a folder, the embedded model, one on a hub, which is downloaded; and profiles."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from headwater.cli.common import ANY_MODEL, one_of, progress_console
from headwater.config import WEIGHTS
from headwater.errors import ConfigError
from headwater.hub_name import HubName
from headwater.models.download import Advance, Download
from headwater.models.families import read_config
from headwater.models.files import EMBEDDED_FOLDER, embedded
from headwater.models.hub import Listing, cached, cached_config
from headwater.models.profiles import PROFILES, Profile, load_profile, profile_named
from headwater.models.published import repository_of
from headwater.traces.recordings import Served

LINE_SECONDS = 10  # between lines of progress without a terminal


def by_name(model: Path) -> Path | HubName | None:
    """Return the embedded model's folder or a hub's model, if `model` is the name of one.

    Raises ConfigError for the name of a profile.
    """
    if str(model) in PROFILES:
        takers = "`headwater inspect`, `size` and `replay` take it"
        wanted = repository_of(str(model)) or "ORG/NAME"
        raise ConfigError(f"{model} is a profile, which has sizes but no weights: {takers}; its weights are {wanted}")
    return EMBEDDED_FOLDER if str(model) == EMBEDDED_FOLDER.name else HubName.parse(str(model))


def named(model: Path | None) -> Path | HubName | None:
    """Return the model that the command line names: a folder if it exists, otherwise a model by its name."""
    return model if model is None or model.exists() else by_name(model) or model


def config_folder(model: Path | HubName | None) -> Path:
    """Return a folder with the model's config.json; of a hub's model only that file is downloaded.

    Raises DownloadError, and CheckpointError for a model that is not supported.
    """
    if not isinstance(model, HubName):
        return model or embedded()
    folder = cached_config(model)
    if folder is None:
        listing = Listing.of(model)
        folder = listing.config()
        tell(f"{model}: config.json of commit {listing.commit[:12]} is downloaded to {folder.parents[2]}")
    return folder


def whole_folder(model: Path | HubName | None) -> Path:
    """Return the folder of a model; the files that a hub's model lacks in the cache are downloaded first.

    Without missing files the network is not used. Raises DownloadError, and CheckpointError for a model that is not
    supported.
    """
    if not isinstance(model, HubName):
        return model or embedded()
    folder = cached(model)
    if folder is not None:
        return folder
    download = Download.of(Listing.of(model))
    if download.has_blocks:
        from headwater.models.headers import check_headers  # imports torch, which takes a second

        check_headers(download.listing, download.folder)
    left, files = download.left, download.missing
    there = sum(file.size for file in files) - left
    kept = f"; {there:,} more are there from an earlier download" if there else ""
    commit = f"commit {download.listing.commit[:12]}"
    count = f"{len(files)} file{'s' * (len(files) != 1)}"
    tell(f"{model}, {commit}: {count}, {left:,} bytes, to {download.folder.parents[2]}{kept}")
    download.check_space()
    with received(left) as advance:
        try:
            download.run(advance)
        except KeyboardInterrupt:
            tell(f"{model}: interrupted with {download.left:,} bytes left; the same command continues")
            raise
    return download.folder


def tell(line: str) -> None:
    progress_console.print(line, highlight=False, markup=False, soft_wrap=True)


class Received:
    """Count of the bytes that arrived, as a line every LINE_SECONDS. Called on several threads."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._started = self._last = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, n: int) -> None:
        with self._lock:
            self._done += n
            now = time.monotonic()
            if now - self._last >= LINE_SECONDS:
                self._last = now
                rate = self._done / (now - self._started) / 1e6
                tell(f"{self._done:,} of {self._total:,} bytes, {rate:,.1f} MB/s")


@contextmanager
def received(total: int) -> Iterator[Advance]:
    """Show the progress of a download; gives the function that takes the number of bytes that arrived."""
    if not progress_console.is_terminal:
        yield Received(total)
        return
    columns = TextColumn("downloading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=progress_console, transient=True) as bars:
        task = bars.add_task("", total=total)
        yield lambda n: bars.advance(task, n)


def any_profile(name: str, weights: str = "auto") -> Profile:
    """Return a profile by its name, or of a model: that of a folder, or of a hub, whose config.json is downloaded.

    Raises ConfigError, CheckpointError and DownloadError.
    """
    model = None if name in PROFILES else named(Path(name))
    return load_profile(name if model is None else str(config_folder(model)), weights=weights)


def profile_for(model: str | None, recorded: Served | None, weights: str | None = None) -> Profile:
    """Return the profile that is named; without a name, that of the recording's model, or of ANY_MODEL.

    Weights are held as `weights` says; without it, as the recording's server held them. Raises ConfigError for a
    recording that does not describe its model.
    """
    weights = one_of("weights", weights or (recorded.weights if recorded else "") or "auto", WEIGHTS)
    if model is not None or recorded is None:
        return any_profile(model or ANY_MODEL, weights)
    if recorded.config:
        spec = read_config(dict(recorded.config), recorded.dtype or "bfloat16", recorded.page_size, weights)
        return profile_named(recorded.model, "the recording", spec)
    if recorded.model in PROFILES:
        return load_profile(recorded.model, weights=weights)
    raise ConfigError(f"the recording does not describe its model {recorded.model!r}: name it with --model")
