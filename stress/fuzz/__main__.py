"""Fuzz the parsers, each for a time: python -m stress.fuzz [--for 60s] [TARGET ...]

Prints executions, what the corpus grew to, and crashes; exits with 1 if there was one. Corpora and the inputs that
crashed are kept in build/fuzz, so a longer run goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stress.fuzz.target import Target
from stress.fuzz.targets import TARGETS
from stress.soak import seconds

WORKPLACE = Path("build/fuzz")
MAX_INPUT_BYTES = 4096  # of an input


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run of one target."""

    executions: int
    coverage: int  # edges that were met
    corpus: int
    crashes: tuple[Path, ...]
    said: str


def fuzz(name: str, target: Target, limit: float) -> Outcome:
    corpus, crashes = WORKPLACE / name / "corpus", WORKPLACE / name / "crashes"
    for folder in (corpus, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    for one in target.seeds:
        (corpus / sha256(one).hexdigest()[:16]).write_bytes(one)
    words = WORKPLACE / name / "words"
    words.write_text("".join(f'"{escaped(word)}"\n' for word in target.words or target.seeds[:1]))  # not none at all
    before = set(crashes.iterdir())
    command = [
        sys.executable, "-m", "stress.fuzz.drive", name, str(corpus), f"-artifact_prefix={crashes}/", f"-dict={words}",
        f"-max_total_time={limit:.0f}", f"-timeout={target.seconds}", f"-max_len={MAX_INPUT_BYTES}",
        "-print_final_stats=1", "-rss_limit_mb=6000",
    ]  # fmt: skip
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit + 300)
    said = process.stdout + process.stderr
    new = tuple(sorted(set(crashes.iterdir()) - before))
    if process.returncode and not new:
        raise RuntimeError(f"{name} did not run: {said[-2000:]}")
    return Outcome(
        last(r"number_of_executed_units: (\d+)", said),
        last(r"cov: (\d+)", said),
        len(list(corpus.iterdir())),
        new,
        said,
    )


def what_happened(said: str) -> str:
    """The exception's traceback, if there is one, or what libFuzzer says of a time-out."""
    begin = max(said.find("=== Uncaught Python exception"), said.find("ALARM"), 0)
    return said[begin:][:3000]


def last(pattern: str, said: str) -> int:
    found = re.findall(pattern, said)
    return int(found[-1]) if found else 0


def escaped(word: bytes) -> str:
    """As libFuzzer's dictionaries have it."""
    return "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\x{b:02x}" for b in word)


def main() -> int:
    parser = argparse.ArgumentParser(description="Hostile bytes for the parsers.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--for", dest="seconds", type=seconds, default=60.0)
    args = parser.parse_args()
    table = Table("target", "executions", "coverage", "corpus", "crashes", title=f"{args.seconds:g} s a target")
    failed = False
    for name in args.targets or TARGETS:
        outcome = fuzz(name, TARGETS[name], args.seconds)
        numbers = (outcome.executions, outcome.coverage, outcome.corpus, len(outcome.crashes))
        table.add_row(name, *(f"{number:,}" for number in numbers))
        for path in outcome.crashes:
            failed = True
            print(f"{name} fails on {path}:\n{what_happened(outcome.said)}", file=sys.stderr)
    Console(width=100).print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
