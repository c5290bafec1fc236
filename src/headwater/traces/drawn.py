"""Traces that are drawn, by name, as a user spells them: `rag(zipf=1.2)`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headwater.cache.spelling import build
from headwater.traces.rag import Rag
from headwater.traces.read import read_trace, tokens_of
from headwater.traces.request import Trace

DRAWN = {"rag": Rag}


def make_trace(
    spelling: str, data: Path | None = None, tokenizer: Path | None = None, limit: int | None = None, seed: int = 0
) -> Trace:
    """A recorded trace, as `read_trace` has it, or one of DRAWN with its options in brackets."""
    if spelling.partition("(")[0].strip() not in DRAWN or "(" not in spelling:
        return read_trace(Path(spelling), data=data, tokenizer=tokenizer, limit=limit)
    drawing = build("trace", spelling, DRAWN)
    if limit is not None:
        drawing = replace(drawing, sessions=min(limit, drawing.sessions))
    return drawing.trace(spelling, tokens_of(tokenizer), data, seed)
