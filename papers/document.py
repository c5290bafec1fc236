"""A figure's run as JSON. It holds every number that the page shows."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from papers.figure import Figure, Found
from papers.lab import Lab


def measure(figure: Figure, lab: Lab) -> dict[str, Any]:
    """Run a figure. `seconds` are of this run: what another figure has run before costs nothing again."""
    assert figure.run is not None, f"{figure.name} is written by a benchmark"
    lab.used.clear()
    begin = time.perf_counter()
    found = figure.run(lab)
    return document(figure, lab, found, time.perf_counter() - begin)


def document(figure: Figure, lab: Lab, found: Found, seconds: float) -> dict[str, Any]:
    """What a figure came to, on what the lab has noted."""
    return {
        "figure": figure.name,
        "paper": figure.paper,
        "seed": lab.seed,
        "limit": lab.limit,
        "runs": [used.as_dict() for used in lab.used],
        "seconds": round(seconds, 1),
        "rows": [asdict(line) for line in found.lines],
        "shapes": [asdict(shape) for shape in found.shapes],
    }
