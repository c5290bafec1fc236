"""The papers' figures on our data: their texts in `figures.toml`, and the functions that compute them. No torch."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from headwater.errors import ConfigError
from papers import alibaba, seglen
from papers.figure import Figure, Found, Line, Shape
from papers.hypic import formulas as segments
from papers.hypic import lab as rag
from papers.lab import Lab
from papers.marconi import agents, conditions, formulas, workloads
from papers.page import page_of
from papers.sparse import overlaps, placements, savings

__all__ = ["FIGURES", "Figure", "Found", "Lab", "Line", "Shape", "figures_named", "page_of"]

# figures without a function are measured by a benchmark
RUNS: dict[str, Callable[[Lab], Found]] = {
    "marconi-table1": formulas.table1,
    "marconi-3a": workloads.fig3a,
    "marconi-3b": formulas.fig3b,
    "marconi-5": formulas.fig5,
    "marconi-6": workloads.fig6,
    "marconi-7": workloads.fig7,
    "marconi-8": workloads.fig8,
    "marconi-9": workloads.fig9,
    "marconi-10a": agents.fig10a,
    "marconi-10b": agents.fig10b,
    "marconi-11": agents.fig11,
    "marconi-12a": agents.fig12a,
    "marconi-12b": agents.fig12b,
    "marconi-13a": agents.fig13a,
    "marconi-13b": agents.fig13b,
    "marconi-14": formulas.fig14,
    "marconi-tuners": agents.tuners,
    "marconi-conditions": conditions.headlines,
    "seglen-swe5": partial(seglen.swebench, think=5.0),
    "seglen-swe10": partial(seglen.swebench, think=10.0),
    "seglen-chat": seglen.chat,
    "seglen-memory": seglen.memory,
    "sparse-1": overlaps.fig1,
    "sparse-2": partial(savings.by_number, dataset=overlaps.NARRATIVE),
    "sparse-2-quality": partial(savings.by_number, dataset=overlaps.QUALITY),
    "sparse-2-prompts": partial(savings.by_number, dataset=overlaps.PROMPTS),
    "sparse-lengths": savings.by_length,
    "sparse-replay": placements.replayed,
    "hypic-table3": segments.table3,
    "hypic-memory": segments.memory,
    "hypic-11-lab": rag.requests_at_1s,
    "hypic-zipf": rag.zipf,
    "hypic-passages": rag.passages,
    "alibaba-ttft": alibaba.ttft,
}


def _figures() -> dict[str, Figure]:
    """Return all figures by name, in the order of the page."""
    tables = tomllib.loads((Path(__file__).parent / "figures.toml").read_text(encoding="utf-8"))
    assert RUNS.keys() <= tables.keys(), f"figures without texts: {RUNS.keys() - tables.keys()}"
    return {
        name: Figure(name, run=RUNS.get(name), **{key: " ".join(text.split()) for key, text in texts.items()})
        for name, texts in tables.items()
    }


FIGURES = _figures()


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
