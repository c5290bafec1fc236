"""Where checkpoints go: a policy a file, in a table by name."""

from __future__ import annotations

from collections.abc import Callable

from headwater.cache.placement.balanced import Balanced
from headwater.cache.placement.branch import Branch
from headwater.cache.placement.every_block import EveryBlock
from headwater.cache.placement.logarithmic import Logarithmic
from headwater.cache.placement.none import NoCheckpoints
from headwater.cache.placement.optimal import Optimal
from headwater.cache.placement.policy import Edge, Path, Placed, Placement, PlacementQuery, Unlearned
from headwater.cache.placement.sqrt import Sqrt
from headwater.cache.placement.structural import Structural
from headwater.cache.spelling import build

PLACEMENT: dict[str, Callable[..., Placement]] = {
    "structural": Structural,
    "branch": Branch,
    "every_block": EveryBlock,
    "balanced": Balanced,
    "sqrt": Sqrt,
    "logarithmic": Logarithmic,
    "optimal": Optimal,
    "none": NoCheckpoints,
}

__all__ = ["PLACEMENT", "Edge", "Path", "Placed", "Placement", "PlacementQuery", "Unlearned", "make_placement"]


def make_placement(spelling: str) -> Placement:
    """`structural`, `every_block(4)`, ...: raises ConfigError for a name that is not in the table."""
    return build("placement", spelling, PLACEMENT)
