"""The papers' figures on our data, in a table by name. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.errors import ConfigError
from papers import alibaba, seglen
from papers.figure import Figure, Found, Line, Shape
from papers.hypic import engine, states
from papers.hypic import formulas as segments
from papers.hypic import lab as rag
from papers.lab import Lab
from papers.marconi import agents, formulas, simulator, sweep, traffic
from papers.page import page_of
from papers.sparse import clock, overlaps, replayed, savings

__all__ = ["FIGURES", "Figure", "Found", "Lab", "Line", "Shape", "figures_named", "page_of"]

# in the order of the page
FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        *(formulas.TABLE_1, traffic.FIG_3A, formulas.FIG_3B, formulas.FIG_5, traffic.FIG_6),
        *(sweep.FIG_7, sweep.FIG_8, sweep.FIG_9, agents.FIG_10A, agents.FIG_10B, agents.FIG_11),
        *(agents.FIG_12A, agents.FIG_12B, agents.FIG_13A, agents.FIG_13B, formulas.FIG_14, simulator.TUNERS),
        *(seglen.SWE_5, seglen.SWE_10, seglen.CHAT, seglen.MEMORY),
        *(overlaps.FIG_1, savings.FIG_2, savings.FIG_2_QUALITY, savings.FIG_2_PROMPTS, savings.BY_LENGTH),
        *(replayed.FIGURE, clock.FRONTIER, clock.LINEAR),
        *(states.LAYER_0, states.TABLE_2, segments.TABLE_3, states.TABLE_4, states.FIG_3, segments.MEMORY),
        *(engine.FIG_12, engine.FIG_10, engine.FIG_11, rag.LOAD, rag.ZIPF, rag.PASSAGES),
        alibaba.FIGURE,
    )
}


def figures_named(names: Sequence[str]) -> list[Figure]:
    """Return the figures of these names in the table's order; all for no name, and `marconi` for all of that paper.

    Raises ConfigError for a name that begins none.
    """
    for name in names:
        if not any(_is(figure, name) for figure in FIGURES.values()):
            raise ConfigError(f"figure {name!r} is unknown; there are {', '.join(FIGURES)}")
    return [figure for figure in FIGURES.values() if not names or any(_is(figure, name) for name in names)]


def _is(figure: Figure, name: str) -> bool:
    return figure.name == name or figure.name.startswith(f"{name}-")
