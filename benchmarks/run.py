"""All questions, one after the other, each in a process of its own: `make bench`.

    python -m benchmarks.run [NAME ...] [--small] [--data FOLDER] [--peers FOLDER] [--peer-python PYTHON]

Writes results/NAME.json for each, and prints one table. The exit code tells whether all of them ran, not whether goals
were reached: the table says that. Benchmarks of recorded traffic are left out if there is no folder of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.rule import Rule
from rich.text import Text

from benchmarks import measure

QUESTIONS = {
    "index": "How fast is the index, and how small?",
    "mixers": "How fast are the recurrent layers?",
    "products": "How fast are products with weights, by format and number of rows?",
    "layer_steps": "What does a decode step take in each kind of layer?",
    "prefill": "How fast are prefill and decode?",
    "decode": "How near is decoding to the speed of memory?",
    "peers": "How fast is the server over HTTP?",
    "warm_ttft": "What does a warm request take beyond the work that is left?",
    "resume": "How soon is a prompt answered that was sent before, or goes on?",
    "restore": "Do checkpoints move at memcpy speed?",
    "overhead": "What does caching cost where it cannot help?",
    "guards": "What do the guards of exactness cost?",
    "chat_load": "Is anything computed twice in chats?",
    "drafting": "How many tokens of recorded answers do drafters guess?",
    "speculation": "How much faster are answers with drafts?",
    "mtp": "How far does the model's head draft, and what does it cost?",
    "draft_trees": "What would trees of drafts accept beside chains?",
    "peer_answers": "How fast are answers over HTTP with drafts and without?",
    "tiers": "What do tiers save after a restart and beyond memory, and what do they cost?",
    "kv_events": "What do KV events cost, and how soon is a reader's picture whole?",
    "weights": "What do fewer bits of weights cost in quality?",
    "startup": "How long until the server answers, and how much memory does it take?",
}
BUSY = 0.1  # cores: more than that disturbs
OF_TRAFFIC = ("drafting", "speculation")
LONGEST = 1800  # seconds that one question may take


def run(name: str, given: argparse.Namespace, out: Path) -> bool:
    """Run one benchmark, and return whether it ran to its end."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--out", str(out)]
    if given.small:
        command += ["--repeats", "1", "--small"]
    if name == "index" and given.peers:
        command += ["--peers", str(given.peers), "--peer-python", given.peer_python]
    if name in OF_TRAFFIC:
        command += ["--data", str(given.data)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {LONGEST:,} seconds", file=sys.stderr)
        return False
    if done.returncode:
        print(f"{name}: {done.stderr.strip()[-2000:]}", file=sys.stderr)
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*QUESTIONS, []], metavar="NAME")
    parser.add_argument("--small", action="store_true", help="sizes that only show that it runs; keeps no results")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with recorded traffic")
    parser.add_argument("--peers", type=Path, help="of index.py")
    parser.add_argument("--peer-python", default=sys.executable, help="of index.py")
    given = parser.parse_args()
    console, table = measure.console(), measure.new_table("make bench")
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if given.small else measure.RESULTS
        for name in given.names or QUESTIONS:
            if name in OF_TRAFFIC and not given.data.is_dir():
                console.print(f"{name}: left out, there is no recorded traffic at {given.data}: give --data FOLDER")
                continue
            started, out = time.perf_counter(), folder / f"{name}.json"
            console.print(f"{name}: {QUESTIONS[name]}", end=" ")
            if not run(name, given, out):
                failed.append(name)
                continue
            console.print(f"{time.perf_counter() - started:.0f} s")
            table.add_section()
            others = json.loads(out.read_text())["run"].get("cores_busy_with_others", 0)
            under = f" ({others} cores were busy with other processes)" if others > BUSY else ""
            table.add_row(Text.assemble((f"{name}: {QUESTIONS[name]}", "bold"), (under, "yellow")))
            measure.add_rows(table, measure.read_rows(out))
    console.print(Rule(), table, json.dumps(measure.machine()))
    if failed:
        sys.exit(f"did not run: {', '.join(failed)}")


if __name__ == "__main__":
    main()
