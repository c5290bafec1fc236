"""A figure's run as JSON. It holds every number that the page shows."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from headwater.figures.figure import Figure
from headwater.figures.lab import Lab


def measure(figure: Figure, lab: Lab) -> dict[str, Any]:
    """Run a figure. `seconds` are of this run: what another figure has run before costs nothing again."""
    lab.used.clear()
    begin = time.perf_counter()
    found = figure.run(lab)
    return {
        "figure": figure.name,
        "paper": figure.paper,
        "seed": lab.seed,
        "limit": lab.limit,
        "runs": [used.as_dict() for used in lab.used],
        "seconds": round(time.perf_counter() - begin, 1),
        "rows": [asdict(line) for line in found.lines],
        "shapes": [asdict(shape) for shape in found.shapes],
    }
