"""benchmarks/README.md: every figure that has a goal, with the goals that were missed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from pages.markdown import origin, spread, table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
HEAD = """\
# Benchmarks, goals and misses

Generated from `benchmarks/results/` by `make pages`. `make bench` runs the benchmarks (`BENCH=NAME` runs one); each
asks one question, which its docstring states. A file of results has the commit, machine, seed and spread of its run.
The table has each figure with a goal: its median and range over repetitions, in the unit of its row. Ratios are
measured interleaved in one run.

Measurements of single subjects stand in [docs/measurements/](../docs/measurements), those of policies in
[docs/policies.md](../docs/policies.md), and the papers' figures in [docs/results.md](../docs/results.md).
"""


def page() -> str:
    """Return the whole page: figures with goals by results file, then the goals that were missed."""
    sections, missed, count = [], [], 0
    for file in sorted(RESULTS.glob("*.json")):
        document = json.loads(file.read_text(encoding="utf-8"))
        rows = [row for row in _rows(document) if row.get("goal")]
        if not rows:
            continue
        count += len(rows)
        missed += [
            f"- `{file.stem}`: {row['name']}: {_median(row)} (goal {row['goal']})." for row in rows if not met(row)
        ]
        lines = [
            (row["name"], row["unit"], row["goal"], spread(row["values"]), "yes" if met(row) else "no") for row in rows
        ]
        place = f"{origin(document['run'])}."
        sections.append(f"## {file.stem}\n\n{place}\n\n{table(('figure', 'unit', 'goal', 'measured', 'met'), lines)}\n")
    summary = f"## Goals that were missed\n\n{len(missed)} of {count}:\n\n" + "\n".join(missed) + "\n"
    return "\n".join([HEAD, summary, *sections])


def met(row: dict[str, Any]) -> bool:
    """Return whether the median of a row reaches its goal."""
    relation, bound = row["goal"].split()
    middle: float = statistics.median(row["values"])
    return middle <= float(bound) if relation == "<=" else middle >= float(bound)


def _median(row: dict[str, Any]) -> str:
    return f"{statistics.median(row['values']):,.4g} {row['unit']}"


def _rows(document: Any) -> list[dict[str, Any]]:
    rows = document.get("rows", []) if isinstance(document, dict) else []
    return [row for row in rows if "values" in row]
