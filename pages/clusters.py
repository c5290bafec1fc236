"""Tables of clusters: routing rules, pulls, hand-overs, and segments in parallel."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pages.markdown import figure, spread, table

STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5th percentile, by number of values
Table = tuple[str, str, str, str, str, Any]  # title, file, module, about, text, document

RULES = (
    "Hits in percent of prompt tokens, then median (ms) and the 95th percentile (s) of the time to the first token; "
    "means with 95% intervals over seeds. "
    "A load is a share of what `least_loaded` sustains: 95% of first tokens within 5 seconds."
)


def tables(load: Callable[[str], Any]) -> Iterator[Table]:
    """Yield the tables of a cluster's page, in order."""
    routers, traffic, pulls = load("routers"), load("routed_traffic"), load("pulls")
    about = "Simulated workers: qwen3.5-9b on an H20, a working set three times their memory. "
    yield "Routing rules, simulated", "routers", "", about + RULES, _rules(routers["cells"]), routers
    about = "Two routers and three workers of headwater-tiny as processes of one machine; computing is emulated: "
    about += "a worker sleeps as long as a single one computed. "
    yield (
        "Routing rules, with processes",
        "routed_traffic",
        "routers --processes --seeds 3",
        about + RULES,
        _rules(traffic["cells"]),
        traffic,
    )
    yield "Pulls, simulated", "pulls", "routers --pulls off,1.25GB/s,12.5GB/s", RULES, _rules(pulls["cells"]), pulls
    cost = load("pull_cost")
    about = "Processor seconds a gigabyte, both ends together."
    yield "Cost of a pull", "pull_cost", "pulls", about, _pull_cost(cost), cost
    parts, seconds = load("hand_over"), load("hand_over_seconds")
    yield "Parts of a hand-over", "hand_over", "", "", _records(parts["rows"]), parts
    about = f"Emulated link of {seconds['link']}; seconds until the first token, and between the first and the second."
    yield (
        "Time of a hand-over",
        "hand_over_seconds",
        "hand_over --link 5MB/s --tokens 2048,8192",
        about,
        _hand_overs(seconds),
        seconds,
    )
    simulated = load("parallel_segments")
    about = "HYPIC's figure 14, by the router's dispatch and with the paper's costs; milliseconds to the first token."
    yield "Segments in parallel, simulated", "parallel_segments", "", about, _records(simulated["figure_14"]), simulated
    about = "16 uneven segments, 100 seeds: time until all are computed, over the least possible time; "
    about += "`half` is half of a 95% interval."
    yield "Rules of dispatch", "parallel_segments", "", about, _records(simulated["rules"]), simulated
    for kind in ("emulated", "real"):
        processes = load(f"parallel_segments_{kind}")
        yield (
            f"Segments in parallel, {kind}",
            f"parallel_segments_{kind}",
            f"parallel_segments --{kind}",
            "",
            _records(processes["rows"]),
            processes,
        )


def _rules(cells: Sequence[dict[str, Any]]) -> str:
    """Format a table with a row for each rule and a column for each cell."""
    header = ["rule", *(f"{cell['workers']} workers, {cell['traffic']}, {cell['load']:.0%}" for cell in cells)]
    names = dict.fromkeys(name for cell in cells for name in cell["rules"])
    rows = [[f"`{name}`", *(_rates(cell["rules"].get(name)) for cell in cells)] for name in names]
    if any("one_worker" in cell for cell in cells):
        rows.append(["one worker with all of it", *(_rates(cell.get("one_worker")) for cell in cells)])
    rows.append(["requests", *(f"{cell['requests']:,}" for cell in cells)])
    rows.append(["memory of a worker, GB", *(figure(cell["memory_each"] / 1e9) for cell in cells)])
    right = [["predictions of the first rule that were right", *(_predicted(cell) for cell in cells)]]
    return table(header, rows + right, "l" + "r" * len(cells))


def _predicted(cell: dict[str, Any]) -> str:
    first = next(iter(cell["rules"].values()))
    return f"{100 * statistics.mean(first['as_predicted']):.2f}%"


def _rates(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return ""
    hits = _interval([100 * value for value in figures["hit_rate"]], 1)
    return f"{hits}; {1000 * statistics.mean(figures['p50']):,.0f}; {_interval(figures['p95'], 2)}"


def _interval(values: Sequence[float], digits: int) -> str:
    """Format a mean with its 95% interval."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    half = STUDENT_T[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def _pull_cost(document: dict[str, Any]) -> str:
    size = document["gigabytes"]
    costs = {name: [sum(pair) / size for pair in pairs] for name, pairs in document["seconds"].items()}
    return table(("way", "s/GB"), [(name, spread(values)) for name, values in costs.items()], "lr")


def _hand_overs(document: dict[str, Any]) -> str:
    groups: dict[tuple[int, str], list[dict[str, float]]] = {}
    for one in document["seconds"]:
        groups.setdefault((one["prompt"], one["way"]), []).append(one)
    rows = [
        (f"{prompt:,}", way, *(spread([one[name] for one in group]) for name in ("first", "gap")))
        for (prompt, way), group in groups.items()
    ]
    return table(("prompt, tokens", "way", "first token, s", "second token after, s"), rows, "rlrr")


def _records(records: Sequence[dict[str, Any]]) -> str:
    """Format records with equal keys, whose names are the columns."""
    header = [name.replace("_", " ") for name in records[0]]
    return table(header, [[_cell(value) for value in record.values()] for record in records], "r" * len(header))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_cell(one) for one in dict.fromkeys(value))
    return figure(value) if isinstance(value, float) else f"{value:,}"
