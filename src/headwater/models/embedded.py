"""The model that is served where no other is given: headwater-tiny, which comes with the package."""

from __future__ import annotations

from pathlib import Path

from headwater.errors import CheckpointError

FOLDER = Path(__file__).parent.parent / "assets" / "headwater-tiny"


def embedded() -> Path:
    """The folder of its checkpoint, in Hugging Face's files. Raises CheckpointError where the package lacks it."""
    if not (FOLDER / "config.json").is_file():
        raise CheckpointError(f"{FOLDER}/config.json is missing: the embedded model was not installed; name another")
    return FOLDER
