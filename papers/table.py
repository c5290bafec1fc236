"""All figures, in the order in which the page has them. A new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.errors import ConfigError
from papers import alibaba
from papers.figure import Figure
from papers.hypic import algebra, drift, passages, quality, rates, table3, zipf
from papers.hypic import clock as segment_clock
from papers.hypic import memory as segment_memory
from papers.marconi import (
    fig3a,
    fig3b,
    fig5,
    fig6,
    fig7,
    fig8,
    fig9,
    fig10,
    fig11,
    fig12,
    fig13,
    fig14,
    table1,
    tuners,
)
from papers.seglen import chat, memory, swebench
from papers.sparse import clock, fig1, lengths, replayed, savings

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        table1.FIGURE,
        fig3a.FIGURE,
        fig3b.FIGURE,
        fig5.FIGURE,
        fig6.FIGURE,
        fig7.FIGURE,
        fig8.FIGURE,
        fig9.FIGURE,
        fig10.BY_LENGTH,
        fig10.TIMES,
        fig11.FIGURE,
        fig12.LAYERS,
        fig12.STATE_SIZES,
        fig13.RATE,
        fig13.PAUSE,
        fig14.FIGURE,
        tuners.FIGURE,
        swebench.FIVE,
        swebench.TEN,
        chat.FIGURE,
        memory.FIGURE,
        fig1.FIGURE,
        savings.NOVELS,
        savings.DOCUMENTS,
        savings.VERSIONS,
        lengths.FIGURE,
        replayed.FIGURE,
        clock.FRONTIER,
        clock.LINEAR,
        algebra.FIRST,
        algebra.ADDITION,
        table3.FIGURE,
        drift.DEEPEST,
        drift.BOUNDARIES,
        segment_memory.FIGURE,
        segment_clock.ALONE,
        quality.FIGURE,
        segment_clock.LOAD,
        rates.FIGURE,
        zipf.FIGURE,
        passages.FIGURE,
        alibaba.FIGURE,
    )
}


def figures_named(names: Sequence[str]) -> list[Figure]:
    """Those figures, in the table's order; all of them for no name, and `marconi` for all of that paper.

    Raises ConfigError for a name that begins none.
    """
    for name in names:
        if not any(_is(figure, name) for figure in FIGURES.values()):
            raise ConfigError(f"figure {name!r} is unknown; there are {', '.join(FIGURES)}")
    return [figure for figure in FIGURES.values() if not names or any(_is(figure, name) for name in names)]


def _is(figure: Figure, name: str) -> bool:
    return figure.name == name or figure.name.startswith(f"{name}-")
