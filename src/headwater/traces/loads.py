"""Loads by name, as a user spells them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from headwater.cache.spelling import build
from headwater.traces.arrivals import Arrivals, Closed, Load, Poisson, Recorded, natural
from headwater.traces.overlay import Like
from headwater.traces.request import Trace

LOADS: dict[str, Callable[..., Load]] = {"recorded": Recorded, "poisson": Poisson, "closed": Closed, "like": Like}
NUMBER = re.compile(r"\d*\.?\d+|\d+\.")


def make_load(spelling: str, data: Path | None = None) -> Load:
    """`2.5` (sessions a second), or one of LOADS with its options. Raises ConfigError. `data`: see read_trace."""
    if NUMBER.fullmatch(spelling.strip()):
        return Poisson(float(spelling))
    table: dict[str, Callable[..., Load]] = {**LOADS, "like": partial(Like, data=data)}
    return build("arrival", spelling, table)


def make_arrivals(trace: Trace, spelling: str | None = None, seed: int = 0, data: Path | None = None) -> Arrivals:
    """A load over a trace; without one, as it was recorded, or interleaved sessions where it was not."""
    return (natural(trace) if spelling is None else make_load(spelling, data)).over(trace, seed)
