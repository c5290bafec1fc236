"""The model that is served by default: headwater-tiny, which comes with the package."""

from __future__ import annotations

from pathlib import Path

from headwater.errors import CheckpointError

FOLDER = Path(__file__).parent.parent / "assets" / "headwater-tiny"


def embedded() -> Path:
    """Return the folder of its checkpoint, in Hugging Face's format. Raises CheckpointError if it is missing."""
    if not (FOLDER / "config.json").is_file():
        raise CheckpointError(f"{FOLDER}/config.json is missing: the embedded model was not installed; name another")
    return FOLDER
