"""The picture of a run: loss, and the share of right answers by kind, over the tokens it has seen.

Circles are held-out answers after each stage, of all lengths up to there.
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

from training.loop import LOG
from training.tasks.example import KINDS

POINTS = 200  # of each line: steps between two of them are averaged


def lines(entries: list[dict[str, Any]], points: int = POINTS) -> tuple[list[float], dict[str, list[float | None]]]:
    """Millions of tokens seen, and by name what the log has of the steps up to there; None where a kind was not asked.

    Shares of right answers are weighted by the number of answers.
    """
    width = max(1, -(-len(entries) // points))
    groups = [entries[at : at + width] for at in range(0, len(entries), width)]
    seen = [total / 1e6 for total in accumulate(sum(entry["tokens"] for entry in group) for group in groups)]
    found: dict[str, list[float | None]] = {"loss": [sum(e["loss"] for e in g) / len(g) for g in groups]}
    for kind in KINDS:
        if any(f"n_{kind}" in entry for entry in entries):
            found[kind] = [_share(group, kind) for group in groups]
    return seen, found


def circles(entries: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """By kind: millions of tokens seen, and the share of held-out answers that is right then."""
    found: dict[str, list[tuple[float, float]]] = {}
    for entry, seen in zip(entries, accumulate(entry["tokens"] for entry in entries), strict=True):
        for kind in KINDS:
            share = _share(entry.get("held_out", []), kind)
            if share is not None:
                found.setdefault(kind, []).append((seen / 1e6, share))
    return found


def _share(group: list[dict[str, Any]], kind: str) -> float | None:
    asked = sum(entry.get(f"n_{kind}", 0) for entry in group)
    right = sum(entry.get(f"n_{kind}", 0) * entry.get(f"right_{kind}", 0.0) for entry in group)
    return right / asked if asked else None


def draw(log: Path, picture: Path) -> None:
    """Write the picture of a run's log."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = (json.loads(line) for line in log.read_text("utf-8").splitlines())
    by_step = {entry["step"]: entry for entry in entries}  # steps that were done again after a stop count once
    run = [by_step[step] for step in sorted(by_step)]
    (seen, found), held_out = lines(run), circles(run)
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    above.plot(seen, found.pop("loss"), color="black")
    above.set_ylabel("loss of what is learned, nats a token")
    above.set_yscale("log")
    for kind, shares in found.items():
        points = [(x, 100 * y) for x, y in zip(seen, shares, strict=True) if y is not None]
        (line,) = below.plot(*zip(*points, strict=True), label=kind)
        for x, y in held_out.get(kind, ()):
            below.plot(x, 100 * y, "o", color=line.get_color(), markeredgecolor="black")
    below.set_ylabel("answers right, % (circles: held out)")
    below.set_xlabel("million tokens seen")
    below.legend(ncols=4, fontsize="small")
    figure.savefig(picture, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m training.curve", description="Draw a run's loss and right answers."
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("picture", type=Path, help="file to be written: .png or .svg")
    options = parser.parse_args()
    draw(options.run / LOG, options.picture)


if __name__ == "__main__":
    main()
