"""Where checkpoints go: a policy a file, in a table by name."""

from __future__ import annotations

from collections.abc import Callable

from headwater.cache.placement.branch import Branch
from headwater.cache.placement.every_block import EveryBlock
from headwater.cache.placement.none import NoCheckpoints
from headwater.cache.placement.policy import Path, Placed, Placement, PlacementQuery, Unlearned
from headwater.cache.placement.structural import Structural
from headwater.cache.spelling import build

PLACEMENT: dict[str, Callable[..., Placement]] = {
    "structural": Structural,
    "branch": Branch,
    "every_block": EveryBlock,
    "none": NoCheckpoints,
}

__all__ = ["PLACEMENT", "Path", "Placed", "Placement", "PlacementQuery", "Unlearned", "make_placement"]


def make_placement(spelling: str) -> Placement:
    """`structural`, `every_block(4)`, ...: raises ConfigError for a name that is not in the table."""
    return build("placement", spelling, PLACEMENT)
