"""Comparison of Headwater with other servers on the same requests.

    python -m benchmarks.comparison RESULTS... --out build/comparison.md

RESULTS are the JSON files, one a server, of the shared time-to-first-token script, taken one after the other on one
machine. Writes a page, and beside this script the figures that it shows, without the answers' texts; `make pages`
writes docs/measurements/comparison.md from them. A peer's hits
count in whole pages of 64 tokens, as ours do: `hits` is Σ ⌊cached/64⌋·64 ÷ Σ prompt tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headwater.cli.common import prepare_outputs
from headwater.machine import cpu
from papers.results import refuse_dirty_tree, write_results

PAGE = 64  # tokens
OURS = "headwater"
FIGURES = Path(__file__).parent / "results" / "comparison.json"
SCENARIOS = {
    "cold": "prompts never seen before: 512, 2,048 and 4,096 tokens",
    "resend": "the same prompts again",
    "chat": "one conversation of 12 turns",
    "shared": "3,000 shared and 1,000 unique tokens, five requests, twice",
    "agents": "8 clients at once, one system prompt, 6 turns each",
    "thinking": "8 turns, reasoning stripped from the history",
}
Run = dict[str, Any]


def answered(run: Run, scenario: str) -> list[Run]:
    requests = run["scenarios"].get(scenario, {}).get("requests", [])
    return [r for r in requests if not r["error"] and r["ttft"] is not None and r["cached"] is not None]


def hit_rate(run: Run, scenario: str) -> float:
    """Return the share of prompt tokens that hit, counted in whole pages."""
    requests = answered(run, scenario)
    return sum(r["cached"] // PAGE * PAGE for r in requests) / sum(r["prompt_tokens"] for r in requests)


def is_first(scenario: str, request: Run) -> bool:
    """Return whether a request cannot hit: the first of a chat or of a shared prompt, and any cold one."""
    return scenario == "cold" or request["label"] in ("turn 1", "request 1")


def ttft(run: Run, scenario: str, cold: bool, prompt: int | None = None) -> float | None:
    """Median seconds to the first token of the requests that could (or, cold, could not) have a hit."""
    times = [
        r["ttft"]
        for r in answered(run, scenario)
        if is_first(scenario, r) == cold and prompt in (None, r["prompt_tokens"])
    ]
    return statistics.median(times) if times else None


def equal_texts(run: Run, scenario: str) -> tuple[int, int]:
    """Answers after a hit that have the text of the same prompt past the cache, and answers that were compared."""
    checked = [r for r in answered(run, scenario) if "same" in r]
    return sum(r["same"] for r in checked), len(checked)


def worst_logprob(run: Run, scenario: str) -> float:
    return max((r["logprob_diff"] for r in answered(run, scenario) if r.get("logprob_diff") is not None), default=0.0)


def one_client(run: Run) -> float:
    """Output tokens a second of one stream, median."""
    rates = [r["tok_s"] for s in ("cold", "resend", "chat") for r in answered(run, s) if r.get("tok_s")]
    return statistics.median(rates)


def eight_clients(run: Run) -> float:
    """Output tokens a second of all eight agents together, prefill included."""
    tokens = sum(r["output_tokens"] for r in answered(run, "agents"))
    return tokens / run["scenarios"]["agents"]["wall_s"]


def figures(run: Run) -> Run:
    """All that the page shows of one server."""
    scenarios = {}
    for name in (s for s in SCENARIOS if s in run["scenarios"]):
        same, checked = equal_texts(run, name)
        scenarios[name] = {
            "hit_rate": hit_rate(run, name),
            "ttft_warm": ttft(run, name, cold=False),
            "ttft_first": ttft(run, name, cold=True),
            "same": same,
            "checked": checked,
            "worst_logprob": worst_logprob(run, name),
            "wall_s": run["scenarios"][name]["wall_s"],
        }
    lengths = sorted({r["prompt_tokens"] for r in answered(run, "cold")})
    return {
        "meta": {
            name: run["meta"][name] for name in ("date", "load_before", "load_after", "memory_mb", "seed", "repeat")
        },
        "scenarios": scenarios,
        "cold_ttft": {str(n): ttft(run, "cold", cold=True, prompt=n) for n in lengths},
        "one_client": one_client(run),
        "eight_clients": eight_clients(run),
    }


def goals(runs: dict[str, Run]) -> list[tuple[str, str, bool]]:
    """Return (goal, figures, reached) for each goal against the peers."""
    ours, peers = runs[OURS], {name: run for name, run in runs.items() if name != OURS}
    rows = []

    def compare(
        what: str, of: Callable[[Run], float | None], better: Callable[[float, float], bool], form: str
    ) -> None:
        best = {name: value for name, run in peers.items() if (value := of(run)) is not None}
        mine = of(ours)
        shown = f"{mine:{form}} against " + ", ".join(f"{value:{form}} ({name})" for name, value in best.items())
        rows.append((what, shown, all(better(mine, value) for value in best.values())))

    for name in SCENARIOS:
        ahead = name in ("shared", "agents")
        of = lambda run, name=name: run["scenarios"].get(name, {}).get("hit_rate")  # noqa: E731
        word = "ahead" if ahead else "at least"
        compare(f"hits, {name}: {word}", of, (lambda a, b: a > b) if ahead else (lambda a, b: a >= b), ".3f")
    for name in list(SCENARIOS)[1:]:
        of = lambda run, name=name: run["scenarios"].get(name, {}).get("ttft_warm")  # noqa: E731
        compare(f"warm TTFT, {name}, s: ahead", of, lambda a, b: a < b, ".3f")
    for n in ours["cold_ttft"]:
        compare(
            f"cold TTFT, {int(n):,} tokens, s: no slower",
            lambda r, n=n: r["cold_ttft"].get(n),
            lambda a, b: a <= b,
            ".2f",
        )
    compare("output tokens/s, 1 client: no lower", lambda r: r["one_client"], lambda a, b: a >= b, ".1f")
    compare("output tokens/s, 8 clients: no lower", lambda r: r["eight_clients"], lambda a, b: a >= b, ".1f")
    same = sum(s["same"] for s in ours["scenarios"].values())
    checked = sum(s["checked"] for s in ours["scenarios"].values())
    rows.append(("equal text in all checks", f"{same} of {checked}", same == checked > 0))
    return rows


def cell(run: Run, scenario: str) -> str:
    s = run["scenarios"].get(scenario)
    if s is None:
        return ""
    if scenario == "cold":
        return "; ".join(f"{int(n):,}: {t:.2f} s" for n, t in run["cold_ttft"].items())
    same = f"{s['same']} of {s['checked']}, to {s['worst_logprob']:.3f}" if s["checked"] else "not checked"
    return f"{s['hit_rate']:.2f}; {s['ttft_warm']:.3f} s; {same}"


def sections(runs: dict[str, Run], machine: str, notes: Sequence[str]) -> str:
    """Return the comparison as Markdown: scenarios, goals, versions."""
    names = list(runs)
    lines = [
        "One random Qwen3.5 checkpoint (37.9 M parameters, bfloat16), one thread per server, the same requests over",
        f"HTTP, one server after the other on one machine: {machine}",
        "(`benchmarks/comparison.py`, `benchmarks/results/comparison.json`).",
        "",
        "For each scenario: hit rate, with hits counted in whole pages of 64 tokens; median time to the first token of",
        "the requests that could hit; number of answers after a hit with the same text as for the same prompt without",
        "the cache, and the largest difference of a token's log-probability over the equal part. Cold: median time to",
        "the first token.",
        "",
        "| scenario | " + " | ".join(names) + " |",
        "| --- |" + " --- |" * len(names),
    ]
    for scenario, what in SCENARIOS.items():
        lines.append(f"| {scenario}: {what} | " + " | ".join(cell(runs[n], scenario) for n in names) + " |")
    lines.append("| output tokens/s, 1 client | " + " | ".join(f"{runs[n]['one_client']:.1f}" for n in names) + " |")
    lines.append(
        "| output tokens/s, 8 agents together | " + " | ".join(f"{runs[n]['eight_clients']:.1f}" for n in names) + " |"
    )
    memory = [runs[n]["meta"].get("memory_mb", {}) for n in names]
    lines.append(
        "| resident memory, start / peak, MB | " + " | ".join(f"{m['start']} / {m['peak']}" for m in memory) + " |"
    )
    lines += ["", "## Goals", "", "| goal | figures | reached |", "| --- | --- | --- |"]
    lines += [f"| {what} | {shown} | {'yes' if reached else 'no'} |" for what, shown, reached in goals(runs)]
    lines += ["", "## Versions and flags", ""]
    for name in names:
        meta = runs[name]["meta"]
        load = " to ".join(f"{m[0]:.1f}" for m in (meta["load_before"], meta["load_after"]))
        lines.append(f"- `{name}`: {meta['date']}, load average {load}")
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def page(runs: dict[str, Run], machine: str, notes: Sequence[str]) -> str:
    """Return the comparison as a page of its own."""
    return f"# Comparison with other engines\n\n{sections(runs, machine, notes)}"


def machine_name() -> str:
    found = cpu()
    features = [f for f in ("avx512f", "avx512_bf16", "amx_bf16") if f in found.features]
    python = platform.python_version()
    return f"{found.name}, {os.cpu_count()} cores, {', '.join(features) or 'no AVX-512'}, Python {python}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figures", type=Path, default=FIGURES, help="file for what the page shows, as JSON")
    parser.add_argument("--note", action="append", default=[], help="a line under the dates: versions and flags")
    given = parser.parse_args()
    prepare_outputs(given.out, given.figures)
    refuse_dirty_tree(given.figures)
    raw = [json.loads(path.read_text()) for path in given.results]
    runs = {run["name"]: figures(run) for run in sorted(raw, key=lambda r: r["name"] != OURS)}
    write_results(given.figures, {"engines": runs}, seed=max(run["meta"]["seed"] for run in runs.values()))
    given.out.write_text(page(runs, machine_name(), given.note))
    for what, shown, reached in goals(runs):
        print(f"{'reached' if reached else 'MISSED ':8} {what:45} {shown}")


if __name__ == "__main__":
    main()
