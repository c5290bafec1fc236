"""Name of a model on a hub such as huggingface.co: ORG/NAME, or ORG/NAME@REVISION."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

WRITTEN = re.compile(r"(?!.*\.\.)(?![^@]*--)(\w[\w.-]*/\w[\w.-]*)(?:@([^\s/]\S*))?")
GGUF_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")  # name of a part of a GGUF file: NAME-00001-of-00003.gguf
SNAPSHOT = re.compile(r"models--(\w[\w.-]*?)--(\w[\w.-]*)/snapshots/[^/]+")  # in huggingface_hub's cache


@dataclass(frozen=True, slots=True)
class HubName:
    """Name of a model on a hub, and the branch, tag or commit that is meant."""

    repository: str  # ORG/NAME
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Read ORG/NAME or ORG/NAME@REVISION; None for anything else, such as an absolute path."""
        found = WRITTEN.fullmatch(text)
        return None if found is None else cls(found[1], found[2] or "main")

    @classmethod
    def of_folder(cls, folder: Path) -> HubName | None:
        """Return the name of a model in huggingface_hub's cache by its folder; None for any other folder."""
        found = SNAPSHOT.fullmatch("/".join(folder.absolute().parts[-3:]))
        return None if found is None else cls(f"{found[1]}/{found[2]}")

    def __str__(self) -> str:
        return self.repository if self.revision == "main" else f"{self.repository}@{self.revision}"


def name_of(folder: Path) -> str:
    """Return the name of the model in a folder or a GGUF file: ORG/NAME in a hub's cache, otherwise the path's name."""
    path = folder.resolve()
    return str(HubName.of_folder(folder) or _without_ending(path.name))


def _without_ending(name: str) -> str:
    part = GGUF_PART.fullmatch(name)
    return part[1] if part else name.removesuffix(".gguf")
