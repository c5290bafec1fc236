"""Cached prompt tokens that a provider reported, against those of the lab's ideal prefix cache, round by round.

    python -m benchmarks.provider_prefixes [--trace NAME] [--granularity TOKENS] [--data FOLDER] [--out FILE]

The lab finds the tokens that a prompt shares with all earlier requests, in the recorded order of arrival. They are
counted as the provider counts (by its own tokens of that prompt), and cut at multiples of the granularity. Gemini's
reports cluster at multiples of about 2,025 tokens, which is 2,048 less 1%: so a reported value is rounded to blocks of
2,025. TraceLab's rounds are of Claude Code and Codex (`--trace tracelab/syfi_coding_trace --granularity 64`).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headwater.lab.tally import Ideal
from headwater.percentile import percentile
from headwater.traces.arrivals import in_order
from headwater.traces.loads import make_arrivals
from headwater.traces.read import read_trace
from headwater.traces.request import Trace
from papers.results import RESULTS, refuse_dirty_tree, write_results

GRANULARITY, REPORTED_BLOCK = 2048, 2025  # tokens
PERCENTS = (5, 25, 50, 75, 95)
DATA = RESULTS.parents[2] / "shared" / "data"


@dataclass(frozen=True)
class Round:
    """Tokens of one request, as its provider counts."""

    prompt: int
    reported: int
    predicted: int
    blocks_more: int  # reported blocks less predicted ones


def rounds(trace: Trace, granularity: int, reported_block: float) -> Iterator[Round]:
    """Yield the requests that report their cached tokens, in the order of arrival."""
    ideal = Ideal(trace, 1)
    for _, request in in_order(make_arrivals(trace)):
        shared, usage = ideal.hit(request).tokens, request.usage
        if usage is None or usage.cached_tokens is None:
            continue
        own = min(shared * usage.prompt_tokens / request.prompt_tokens, usage.prompt_tokens - 1)
        blocks = int(own // granularity)
        more = round(usage.cached_tokens / reported_block) - blocks
        yield Round(usage.prompt_tokens, usage.cached_tokens, blocks * granularity, more)


def figures(found: Iterable[Round]) -> dict[str, tuple[str, float]]:
    """Return the distribution of differences: figure to unit and value."""
    found = list(found)
    prompts = sum(one.prompt for one in found)
    blocks = Counter(one.blocks_more for one in found)
    differences = sorted(one.reported - one.predicted for one in found)
    none = sum(not one.reported and one.predicted > 0 for one in found)

    def share(*within: int) -> tuple[str, float]:
        return "%", 100 * sum(blocks[one] for one in within) / len(found)

    return {
        "requests": ("", len(found)),
        "prompt tokens": ("M", prompts / 1e6),
        "cached, as reported": ("M", sum(one.reported for one in found) / 1e6),
        "cached, as predicted": ("M", sum(one.predicted for one in found) / 1e6),
        "hit rate, as reported": ("%", 100 * sum(one.reported for one in found) / prompts),
        "hit rate, as predicted": ("%", 100 * sum(one.predicted for one in found) / prompts),
        "requests with the predicted number of blocks": share(0),
        "requests within one block": share(-1, 0, 1),
        "requests with a block more than predicted": share(1),
        "requests with two blocks more, or above": share(*(one for one in blocks if one > 1)),
        "requests with a block less than predicted": share(-1),
        "requests with two blocks less, or below": share(*(one for one in blocks if one < -1)),
        "requests with nothing cached, and a block predicted": ("%", 100 * none / len(found)),
        **{f"reported less predicted, p{p}": ("tokens", percentile(differences, p)) for p in PERCENTS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="mini_swe_agent", help="with usage, below --data")
    parser.add_argument("--granularity", type=int, default=GRANULARITY, help="tokens of a cached block")
    parser.add_argument("--reported-block", type=float, help="tokens of a block in reports")
    parser.add_argument("--limit", type=int, help="sessions")
    parser.add_argument("--data", type=Path, default=DATA, help="recorded traffic")
    parser.add_argument("--out", type=Path, default=RESULTS / "provider_prefixes.json")
    given = parser.parse_args()
    refuse_dirty_tree(given.out)
    usual = REPORTED_BLOCK if given.granularity == GRANULARITY else given.granularity
    trace = read_trace(Path(given.trace), data=given.data, limit=given.limit)
    found = figures(rounds(trace, given.granularity, given.reported_block or usual))
    rows = [
        {"name": name, "unit": unit, "values": [round(value, 3)], "goal": ""} for name, (unit, value) in found.items()
    ]
    run = {"trace": trace.name, "granularity": given.granularity, "repeats": 1}
    write_results(given.out, {"run": run, "rows": rows}, seed=None)
    for row in rows:
        print(f"{row['name']}: {row['values'][0]:,.1f} {row['unit']}")


if __name__ == "__main__":
    main()
