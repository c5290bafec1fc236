"""docs/columns.md, from the fields of the lab's rows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from headwater.lab.row import Routing, Row, Segments, Spread
from pages.markdown import table

HEAD = """\
# Columns of `headwater replay --out`

A row is one choice of memory, pool, placement and eviction. Generated from the code by `make pages`. The first columns
are the run: `version`, `commit` (+ with uncommitted changes; empty without a clone), `trace`, `trace_digest` (of all
requests), `model`, `dtype`, `weights`, `page_size`, `seed`, `limit`, `arrival`, `serve` (the device).
"""
FIELD = re.compile(r"^    (\w+): ([^=#]+?)(?: = [^#]+)?(?:  # (.*))?$", re.MULTILINE)
NESTED = {"ttft_ms": Spread, "tpot_ms": Spread, "segments": Segments, "cluster": Routing}
KINDS = {"evictions": "a column a kind", "misses_by_reason": "a column a reason"}


def page() -> str:
    """Return the page: a column of a file a line."""
    return f"{HEAD}\n{table(('column', 'contents'), _columns(Row, ''))}\n"


def _columns(kind: type, prefix: str) -> Iterator[tuple[str, str]]:
    for name, _, about in FIELD.findall(inspect.getsource(kind)):
        if name in NESTED and not prefix:
            yield from _columns(NESTED[name], f"{name}_")
        elif name in KINDS:
            yield f"`{prefix}{name}_...`", KINDS[name]
        else:
            yield f"`{prefix}{name}`", about
