"""Placement policies by name, one file or folder each; `base.py` has what they share."""

from __future__ import annotations

from collections.abc import Callable

from headwater.cache.placement.base import Placement
from headwater.cache.spelling import build, classes, own_class

# file: its class. The file's name is the policy's
PLACEMENT: dict[str, Callable[..., Placement]] = classes(
    __name__,
    {
        "headwater": "Headwater",
        "structural": "Structural",
        "branch": "Branch",
        "every_block": "EveryBlock",
        "balanced": "Balanced",
        "sqrt": "Sqrt",
        "logarithmic": "Logarithmic",
        "optimal": "Optimal",
        "none": "NoCheckpoints",
    },
)


def make_placement(spelling: str) -> Placement:
    """Build the policy that `spelling` names: `structural`, `every_block(4)`, `./mine.py:Mine`. Raises ConfigError."""
    own = own_class(spelling)
    table: dict[str, Callable[..., Placement]] = PLACEMENT | dict([own] if own else [])
    return build("placement", spelling, table)
