"""Download of a hub's model into huggingface_hub's cache, which continues where an earlier one broke off."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from headwater.config_keys import read_json
from headwater.errors import DownloadError
from headwater.models.families.quantised import quantisation
from headwater.models.files import CONFIG, INDEX, SMALL_FILES, TOKENIZER, TOKENIZER_CONFIG, weight_files
from headwater.models.hub import HubFile, Listing, explained, http_client, sender
from headwater.models.tiktoken import check_class

PARALLEL = 4  # files
TRIES = 5  # attempts in a row that bring no byte
PAUSE = 1.0  # seconds between two attempts
LONGEST = 50 * 10**9  # bytes of a file that a hub sends over plain HTTP; huggingface_hub has another protocol

Advance = Callable[[int], None]  # takes bytes that arrived; a negative number if some must be fetched again


@dataclass(frozen=True, slots=True)
class Download:
    """The files of a model that the cache lacks, the small ones first. `folder` is the model's folder in the cache."""

    listing: Listing
    folder: Path
    missing: tuple[HubFile, ...]

    @classmethod
    def of(cls, listing: Listing) -> Download:
        """Plan a download. It fetches config.json and the index of the weights, which tell what else is needed.

        Raises DownloadError, and CheckpointError for a model that is not supported, before any weights are fetched.
        """
        listing.check_loadable()
        folder = listing.config()
        small = [name for name in SMALL_FILES if name in listing.files]
        if TOKENIZER not in small:
            check_class(read_json(listing.get(TOKENIZER_CONFIG)), listing.name)
        if INDEX in small:
            listing.get(INDEX)
        weights = weight_files(folder, listing.files)
        absent = [name for name in weights if name not in listing.files]
        if absent:
            raise DownloadError(
                f"{listing.name} lacks {len(absent)} of {len(weights)} files of weights: {absent[0]}, ..."
            )
        missing = (listing.files[name] for name in (*small, *weights) if not (folder / name).exists())
        return cls(listing, folder, tuple(missing))

    @property
    def has_blocks(self) -> bool:
        """True for weights of bitsandbytes, whose blocks are known by the headers of the files."""
        return (quantisation(read_json(self.folder / CONFIG)) or {}).get("quant_method") == "bitsandbytes"

    @property
    def left(self) -> int:
        """Bytes still to be fetched, without those of an earlier download that broke off."""
        return sum(file.size - self._kept(file) for file in self.missing)

    def check_space(self) -> None:
        """Raise DownloadError if the disk of the cache has too little space."""
        left, free = self.left, shutil.disk_usage(self.folder).free
        if left > free:
            place = self.folder.parents[2]
            raise DownloadError(
                f"{self.listing.name} needs {left:,} bytes, {place} has {free:,} free: make room, or set HF_HOME"
            )

    def run(self, advance: Advance) -> None:
        """Fetch all files; `advance` is called on several threads. Raises DownloadError.

        If it is interrupted, the threads end with their next bytes, and what arrived is kept.
        """
        stop = threading.Event()
        large = [file for file in self.missing if file.name not in SMALL_FILES]
        for file in self.missing:
            if file not in large:
                self.listing.get(file.name)
                advance(file.size)
        with ThreadPoolExecutor(PARALLEL) as pool:
            fetched = [pool.submit(self._fetch, file, advance, stop) for file in large]
            try:
                for one in as_completed(fetched):
                    one.result()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch(self, file: HubFile, advance: Advance, stop: threading.Event) -> None:
        """Fetch one file, in a way that can be continued if its content has a hash and is sent over plain HTTP."""
        if file.sha256 is None or file.size > LONGEST:
            self.listing.get(file.name)
            advance(file.size)
            return
        with explained(self.listing.name):
            self._fetch_hashed(file, advance, stop)
        if not stop.is_set():
            self.listing.get(file.name)  # finds its content in the cache, and adds it to the folder

    def _fetch_hashed(self, file: HubFile, advance: Advance, stop: threading.Event) -> None:
        """Complete the file's part that is there, and rename it if its hash is right. One process at a time does so."""
        content, part = self._content(file), self._part(file)
        content.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as out:
            while not locked(out):
                if stop.wait(PAUSE):
                    return
            if content.exists():  # another process was faster
                part.unlink(missing_ok=True)
                return
            receive(self.listing, file, out, advance, stop)
            out.flush()
            if stop.is_set():
                return
            with part.open("rb") as whole:
                found = hashlib.file_digest(whole, "sha256").hexdigest()
            if found != file.sha256:
                part.unlink()
                raise DownloadError(f"{file.name} of {self.listing.name} arrived damaged and was deleted: run again")
            part.replace(content)

    def _content(self, file: HubFile) -> Path:
        """The place of a file's content in the cache, which huggingface_hub looks up by its hash."""
        return self.folder.parents[1] / "blobs" / str(file.sha256)

    def _part(self, file: HubFile) -> Path:
        return self._content(file).with_name(f"{file.sha256}.incomplete")

    def _kept(self, file: HubFile) -> int:
        """Return the bytes of a file that are in the cache by now."""
        places = [self.folder / file.name]
        if file.sha256 is not None:
            places += [self._content(file), self._part(file)]
        return min(next((path.stat().st_size for path in places if path.exists()), 0), file.size)


def locked(file: BinaryIO) -> bool:
    """Lock a file until it is closed; returns False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def receive(listing: Listing, file: HubFile, out: BinaryIO, advance: Advance, stop: threading.Event) -> None:
    """Append the rest of a file to the part that `out` has, and continue when the connection breaks.

    Raises DownloadError if TRIES attempts in a row bring no byte, HfHubHTTPError for an answer that is an error.
    """
    tries, client = 0, http_client()
    while (have := out.seek(0, 2)) < file.size and not stop.is_set():
        try:
            _append(listing, file, out, have, advance, stop)
        except client.TransportError as error:
            tries = tries + 1 if out.tell() == have else 1
            if tries == TRIES:
                raise DownloadError(
                    f"{file.name} of {listing.name} broke off at {have:,} of {file.size:,} bytes "
                    f"({type(error).__name__}): the same command continues"
                ) from error
            stop.wait(PAUSE)


def _append(listing: Listing, file: HubFile, out: BinaryIO, have: int, advance: Advance, stop: threading.Event) -> None:
    """Request the bytes from `have` on, and write those that arrive."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(listing.name.repository, file.name, revision=listing.commit)
    headers = build_hf_headers(**sender(), headers={"Accept-Encoding": "identity", "Range": f"bytes={have}-"})
    limit = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=limit, follow_redirects=True) as answer:
        hf_raise_for_status(answer)
        if answer.status_code == 200 and have:  # the whole file, from its first byte
            out.truncate(0)
            advance(-have)
        for chunk in answer.iter_bytes():
            out.write(chunk)
            advance(len(chunk))
            if stop.is_set():
                return
