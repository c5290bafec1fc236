"""Cost of composition in right answers.

    python -m benchmarks.segment_quality [--model FOLDER] [--every 6] [--out docs/results]

Asks a server of the embedded model the held-out questions about documents in every way (`headwater eval --segments`),
of every so many groups one. Writes HYPIC's figure 10 as `python -m papers` would.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import zstandard

from headwater.cli import run
from headwater.cli.common import prepare_outputs
from headwater.evaluate.items import DEFAULT_TASKS
from papers import FIGURES
from papers.hypic.measured import quality
from papers.lab import Lab, document, write
from papers.results import refuse_dirty_tree


def sampled(every: int) -> str:
    """JSON lines of the items with documents, of one group in `every`."""
    with zstandard.open(DEFAULT_TASKS, "rt", encoding="utf-8") as file:
        items = [json.loads(line) for line in file]
    with_documents = [item for item in items if item["documents"]]
    kept = set(sorted({item["group"] for item in with_documents})[::every])
    return "".join(json.dumps(item) + "\n" for item in with_documents if item["group"] in kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; without it, the embedded model")
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    given = parser.parse_args()
    prepare_outputs(folders=[given.out])
    refuse_dirty_tree(given.out)
    if given.every < 1:
        parser.error(f"--every is {given.every}, must be at least 1")
    begin = time.perf_counter()
    found = given.out / ".hypic-10.evaluation"  # in the output folder, so that a run that was cut short continues
    with tempfile.TemporaryDirectory() as scratch:
        tasks = Path(scratch) / "tasks.jsonl"
        tasks.write_text(sampled(given.every), encoding="utf-8")
        options = ["--segments", "--tasks", str(tasks), "--json", str(found)]
        code = run(["eval", *options, *([str(given.model)] if given.model else [])])
        if code:
            raise SystemExit(code)
        evaluation = json.loads(found.read_text(encoding="utf-8"))
    written = document(FIGURES["hypic-10"], Lab(limit=given.every), quality(evaluation), time.perf_counter() - begin)
    write(written, given.out)
    found.unlink()
    for shape in written["shapes"]:
        print(f"{shape['says']}: {shape['holds']}")


if __name__ == "__main__":
    main()
