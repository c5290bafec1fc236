"""Which file a user means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwater.errors import TraceError

ENDINGS = {".jsonl", ".json", ".csv", ".trace"}  # of traces in a folder, .zst or .gz aside


def find(path: Path, data: Path | None = None) -> Path:
    """The file: as it is named, or below `data`; its endings may be missing, or it may be a folder's only one.

    Raises TraceError where there is none, or more than one.
    """
    for candidate in (path, *([data / path] if data is not None else ())):
        found = _files(candidate)
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(sorted(stem(file) for file in found))
            raise TraceError(f"{candidate} is {len(found)} files, must be one of {names}")
    raise TraceError(f"{path} is no file{'' if data is None else f', nor is there one below {data}'}")


def stem(path: Path) -> str:
    """The name without any endings."""
    return path.name.partition(".")[0]


def name_of(path: Path) -> str:
    """As the user wrote it, without endings; of a path from elsewhere, its last part."""
    far = path.is_absolute() or ".." in path.parts
    return stem(path) if far else (path.parent / stem(path)).as_posix()


def _files(path: Path) -> list[Path]:
    """What a path may mean, best first: itself, the traces of a folder, the one of that name, those it begins."""
    if path.is_file():
        return [path]
    if path.is_dir():
        return _traces(path, lambda name: True)
    if not path.parent.is_dir():
        return []
    exact = _traces(path.parent, lambda name: name == path.name)
    return exact or _traces(path.parent, lambda name: name.startswith(path.name))


def _traces(folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    files = (file for file in sorted(folder.iterdir()) if file.is_file())
    return [file for file in files if wanted(stem(file)) and ENDINGS & set(file.suffixes)]
