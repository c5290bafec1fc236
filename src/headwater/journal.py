"""Journal of a long run: its finished parts, kept in a file next to the output until the output is written."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Journal:
    """Finished parts of a run by name. A run with the same settings that was cut short continues where it ended.

    The file is `.OUTPUT.unfinished`: JSON lines, the settings first. Without an output nothing is kept. Threads may
    share a journal. A last line that was torn by a killed process is left out.
    """

    def __init__(self, output: Path | None, settings: object) -> None:
        self._path = None if output is None else output.with_name(f".{output.name}.unfinished")
        self._lock = threading.Lock()
        self._head = f"{json.dumps(settings, default=str, sort_keys=True)}\n"
        self._parts = self._read()
        self.found = len(self._parts)  # parts of the earlier run
        self._begun = False

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def add(self, name: str, value: Any) -> None:
        """Keep a part, a value of JSON, and write it at once."""
        with self._lock:
            self._parts[name] = value
            if self._path is not None and self._begun:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(_line(name, value))
            elif self._path is not None:  # without what a killed process left of a last line
                lines = (_line(*part) for part in self._parts.items())
                new = self._path.with_name(f"{self._path.name}.new")  # killed meanwhile, nothing kept is lost
                new.write_text("".join([self._head, *lines]), encoding="utf-8")
                new.replace(self._path)
                self._begun = True

    def part(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return a part, computed and kept if it is not there."""
        if name not in self:
            self.add(name, compute())
        return self[name]

    def end(self) -> None:
        """Remove the file: the output is written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        """Return the parts in the file; none without a file of the same settings."""
        if self._path is None or not self._path.is_file():
            return {}
        try:
            first, *lines = self._path.read_text(encoding="utf-8").split("\n")
            return dict(json.loads(line) for line in lines[:-1]) if f"{first}\n" == self._head else {}
        except ValueError:  # another program's file
            return {}


def _line(name: str, value: Any) -> str:
    return json.dumps([name, value]) + "\n"
