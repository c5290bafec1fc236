"""Digest of a checkpoint's files. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from headwater.cache_folder import own_folder, write_whole
from headwater.models.gguf.file import parts_of

WEIGHT_FILES = ("*.safetensors", "*.gguf", "config.json")

log = logging.getLogger("headwater.models")


def weights_digest(path: Path) -> str:
    """Return the digest of a checkpoint's files; it is kept in the cache folder until a file changes."""
    files = parts_of(path)
    if path.is_dir():
        files = sorted({file for pattern in WEIGHT_FILES for file in path.glob(pattern)})
    known = [_identity(file) for file in files]
    try:
        kept = own_folder() / f"weights-{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]}.txt"
        return kept.read_text(encoding="ascii")
    except FileNotFoundError:
        digest = _digest(files)
        with suppress(OSError):
            write_whole(kept, [digest], 0o600)
        return digest
    except OSError as error:
        log.info("weights are read for their digest at each start: %s", error)
        return _digest(files)


def _identity(file: Path) -> tuple[str, int, int, int]:
    found = file.stat()
    return str(file.resolve()), found.st_size, found.st_mtime_ns, found.st_ino


def file_digest(file: Path) -> str:
    """Return the digest of a file's content. Raises OSError."""
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()


def _digest(files: Iterable[Path]) -> str:
    running = blake3(max_threads=blake3.AUTO)
    for file in files:
        running.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        running.update_mmap(file)
    return running.hexdigest()
