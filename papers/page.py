"""The results page: figures with the numbers of their JSON documents and the words of their modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papers.figure import Figure
from papers.results import commit_of

HEAD = """# The papers' figures, on our data

`make results` runs all figures and generates this page from [results/](results): numbers and verdicts ("came out")
are computed from our rows, and only the texts were written by hand. Where the working tree of a run was not
recorded, the commit is the first one that has these numbers.

The data of two papers is published: SegLen's traces on Hugging Face (`datasets/Isabella5/sglang-seglen-benchmark`),
Marconi's artifact on Zenodo (record 14970139). Neither was reached from the machines of these runs. So each figure
ran on recorded traffic that is as similar as possible, which is named below it.

To run with them, put the files anywhere below a folder, under their own names
(`swebench_sps=10_art=5_nums=100.jsonl`), and run `python -m papers seglen marconi --data FOLDER`. SegLen's agents
and Marconi's figures 7 to 13 (SWE-bench and ShareGPT) then use them with their own times, and the page names them.
The traces of the published simulator are read with `--peers`.
"""


def page_of(figures: Sequence[Figure], documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page as Markdown. `documents` by figure; a figure without one is left out."""
    shown = [figure for figure in figures if figure.name in documents]
    parts = [HEAD, _summary(shown, documents)]
    parts += [_section(figure, documents[figure.name]) for figure in shown]
    return "\n".join(parts)


def given(value: float | None) -> str:
    """Format a number of the paper."""
    return "" if value is None else f"{value:,}"


def number(value: float | None) -> str:
    """Format our number with three digits, or all digits of a whole number."""
    if value is None:
        return ""
    if 0 < abs(value) < 1e-3:
        return f"{value:.3g}"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1e6:
        return f"{value:.4g}"
    digits = max(0, 3 - len(str(int(abs(value)))) + (abs(value) < 1))
    return f"{value:,.{digits}f}"


def _summary(figures: Sequence[Figure], documents: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| figure | | shapes that came out |", "| --- | --- | --- |"]
    for figure in figures:
        shapes = documents[figure.name]["shapes"]
        held = sum(shape["holds"] for shape in shapes)
        count = f"{held} of {len(shapes)}" if shapes else ""
        lines.append(f"| [{figure.name}](#{figure.name}) | {figure.title} | {count} |")
    return "\n".join([*lines, ""])


def _section(figure: Figure, document: Mapping[str, Any]) -> str:
    lines = [f"## {figure.name}", "", f"**{figure.title}.** {figure.paper}: {figure.claim}", ""]
    lines += ["| | paper | ours | |", "| --- | ---: | ---: | --- |"]
    for row in document["rows"]:
        lines.append(f"| {row['label']} | {given(row['paper'])} | {number(row['ours'])} | {row['unit']} |")
    lines.append("")
    lines += [f"- {shape['says']}: **{verdict(shape['holds'])}**." for shape in document["shapes"]]
    lines += [""] if document["shapes"] else []
    lines += [figure.difference, "", _footer(figure, document), ""]
    return "\n".join(lines)


def verdict(holds: bool) -> str:
    return "came out" if holds else "did not come out"


def _footer(figure: Figure, document: Mapping[str, Any]) -> str:
    """Return the figure's footer: the traces and settings of its runs."""
    runs: dict[tuple[str, int, int], dict[str, None]] = {}
    for used in document["runs"]:
        setting = runs.setdefault((used["trace"], used["requests"], used["prompt_tokens"]), {})
        if used["model"]:
            setting[f"{used['model']} at page {used['page_size']}, {used['arrivals']}"] = None
    run = document["run"]
    origin = f" Commit {commit_of(run)}." if "commit" in run else ""
    if figure.run is None and not runs:
        return f"_Measured by a benchmark. Seed {run['seed']}, {number(document['seconds'])} s.{origin}_"
    if not runs:
        return f"_Only from the model's formulas.{origin}_"
    texts = [
        f"{trace}, {requests:,} requests, {tokens / 1e6:,.1f} M prompt tokens: {'; '.join(settings)}".removesuffix(": ")
        for (trace, requests, tokens), settings in runs.items()
    ]
    return f"_Seed {run['seed']}, {number(document['seconds'])} s. {'. '.join(texts)}.{origin}_"
