"""What every policy hits on every trace, at four sizes of memory: docs/policies.md.

    python -m benchmarks.policies [--data FOLDER] [--seed 0] [--traces NAME,...]

Requests come one by one, Qwen3.5-9B, pages of 64 tokens; where sessions have no recorded starts they are drawn.
Writes results/policies.json, which the page is made of.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path

from headwater.cache.eviction import EVICTION
from headwater.lab.replay import run_grid
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.traces.loads import make_arrivals
from headwater.traces.read import read_trace

HERE = Path(__file__).resolve().parent
MODEL = "qwen3.5-9b"
OPTIONS = {"path_cap": "(4)", "last_n": "(100)", "flop_aware": "(1.0)"}
PLACEMENTS = ("structural", "every_block(8)", "sqrt", "balanced(8)", "logarithmic(8)", "optimal(8)")
LONG = 20_000  # requests
SIZES = {  # GB: from a few of the trace's requests to most of what the ideal hits
    "mini_swe_agent": (5, 10, 20, 40),
    "mooncake/conversation": (50, 150, 400, 1000),
    "claude_code/global_v6": (25, 50, 100, 200),
    "mtbench101": (0.5, 1, 2, 4),
}


def measured(name: str, data: Path, seed: int) -> dict[str, object]:
    """All eviction policies under `branch`, and `structural` with ours; on short traces all placements under lru."""
    trace = read_trace(Path(name), data=data)
    evictions = [policy + OPTIONS.get(policy, "") for policy in EVICTION]
    pairs = [("branch", e) for e in evictions] + [("structural", "headwater")]
    if len(trace.requests) < LONG:
        pairs += [(placement, "lru") for placement in PLACEMENTS]
    profile = load_profile(MODEL)
    setups = [Setup(profile, int(gb * 1e9), p, e) for gb, (p, e) in product(SIZES[name], pairs)]
    results = dict(run_grid(trace, setups, partial(make_arrivals, seed=seed)))
    rows = [results[number].row.as_dict() for number in range(len(setups))]
    return {"trace": name, "requests": len(trace.requests), "notes": trace.notes, "seed": seed, "rows": rows}


def page(documents: Iterable[dict]) -> str:
    parts = [
        "# What each policy hits",
        "Made by `make policies` out of `benchmarks/results/policies.json`. Token hit rate in percent: prompt tokens",
        "that were not computed, of all. Requests one by one, Qwen3.5-9B (51.5 MB a checkpoint, 32 KiB of KV a token),",
        "pages of 64 tokens, one pool. *Ideal* is endless memory and a checkpoint at every unit; `clairvoyant` knows",
        "the future and is greedy. The best of a column that knows no future is bold.",
        "",
    ]
    for document in documents:
        parts += _section(document)
    return "\n".join(parts)


def _section(document: dict) -> list[str]:
    rows = document["rows"]
    sizes = sorted({row["memory"] for row in rows})
    rates = {(row["placement"], row["eviction"], row["memory"]): row["token_hit_rate"] for row in rows}
    pairs = list(dict.fromkeys((row["placement"], row["eviction"]) for row in rows))
    best = {size: max(rates[(*pair, size)] for pair in pairs if pair[1] != "clairvoyant") for size in sizes}
    lines = [f"## {document['trace']}: {document['requests']:,} requests", "", *document["notes"], ""]
    lines.append("| placement | eviction | " + " | ".join(f"{size / 1e9:g} GB" for size in sizes) + " |")
    lines.append("| --- | --- |" + " ---: |" * len(sizes))
    lines.append("| every unit | ideal |" + f" {100 * rows[0]['ideal_hit_rate']:.1f} |" * len(sizes))
    for pair in pairs:
        cells = []
        for size in sizes:
            rate = rates[(*pair, size)]
            mark = "**" if rate == best[size] and pair[1] != "clairvoyant" else ""
            cells.append(f"{mark}{100 * rate:.1f}{mark}")
        lines.append(f"| {pair[0]} | {pair[1]} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE.parents[1] / "shared" / "data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", default=",".join(SIZES))
    given = parser.parse_args()
    out = HERE / "results" / "policies.json"
    known = {document["trace"]: document for document in json.loads(out.read_text())} if out.exists() else {}
    for name in given.traces.split(","):
        known[name] = measured(name, given.data, given.seed)
        out.write_text(json.dumps([known[trace] for trace in SIZES if trace in known], indent=1) + "\n")
        (HERE.parent / "docs" / "policies.md").write_text(page(json.loads(out.read_text())))
        print(f"{name}: {len(known[name]['rows'])} rows")


if __name__ == "__main__":
    main()
