"""Folder for files that spare work at the next start: compiled kernels, the proof of exactness. Imports no torch.

Also files that are written whole or not at all.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder: HEADWATER_CACHE_DIR, systemd's CACHE_DIRECTORY, or XDG's.

    Raises OSError if none is named and the user has no home.
    """
    if own := environment.get("HEADWATER_CACHE_DIR"):
        return Path(os.path.expanduser(own))
    if of_systemd := environment.get("CACHE_DIRECTORY", "").partition(":")[0]:
        return Path(of_systemd)
    base = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # as the specification has it, a relative path is ignored
        base = os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise OSError("this user has no home, and HEADWATER_CACHE_DIR is not set")
    return Path(base) / "headwater"


def own_folder(*below: str) -> Path:
    """Make the folder, and folders below it, for this user only. Raises OSError if it cannot be, or is another's."""
    folder = cache_folder(os.environ)
    for path in (folder, *(folder.joinpath(*below[:i]) for i in range(1, len(below) + 1))):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found, user = path.stat(), os.geteuid()
        if found.st_uid != user:
            raise PermissionError(f"{path} belongs to user {found.st_uid}, this process is of user {user}")
        if found.st_mode & 0o022:
            raise PermissionError(
                f"{path} has mode {found.st_mode & 0o777:o}: other users can write to it, must be 700"
            )
    return path


def write_whole(path: Path, parts: Iterable[str], mode: int = 0o666) -> None:
    """Write a file next to `path`, and rename it to `path` when it is complete. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(handle, "w", encoding="utf-8") as file:
            file.writelines(parts)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
