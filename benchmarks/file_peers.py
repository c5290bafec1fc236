"""Speed with the same GGUF file in Headwater and in llama.cpp, by the type of its tensors, in turns over HTTP.

    python -m benchmarks.file_peers --model FOLDER --peers FOLDER [--types Q3_K,IQ4_XS,MXFP4,Q4_K] [--files FOLDER]
        [--processor AVX2] [--cold 512] [--prompt 512] [--outputs 64] [--repeats 3]

The tests' converter writes a file of each type from `--model`: Q4_K is rounded, the others have random codes, whose
values have the right magnitude. `--files` keeps them for the next run. Of each type both servers are up at once.
`--processor` restricts the kernels of Headwater, as tests do; llama.cpp uses the instructions that its build has.
Without `--peers` only Headwater is measured, without `--model` with a random checkpoint.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks import measure
from benchmarks.engines import bench_checkpoint
from benchmarks.measure import Row
from benchmarks.peers import ROOT, Running, Wanted, compared, report, servers_parser, servers_read, started
from tests.checkpoints.tokenizer import sayable
from tests.gguf_files.convert import convert
from tests.processors import ENVIRONMENTS, had

TYPES = ("Q3_K", "IQ4_XS", "MXFP4", "Q4_K")
MIN_SPEED = 1.0  # times the peer's
SMALL = {"types": TYPES[:1], "cold": 128, "prompt": 64, "outputs": 16}


def file_of(kind: str, model: Path, folder: Path) -> Path:
    """Return the file of a type, which is written if it is not there."""
    file = folder / f"{model.name}-{kind}.gguf"
    if not file.exists():
        convert(model, file.with_suffix(".unfinished"), kind).rename(file)
    return file


def rows_of(kind: str, servers: list[Running], given: argparse.Namespace) -> Iterator[Row]:
    """Yield the figures of each server, and how many times as fast as its peer Headwater is."""
    prompt = random.Random(given.seed + 1).choices(servers[0].words, k=given.prompt)
    work = {
        (f"cold TTFT, {given.cold:,} tokens", "ms"): partial(Running.cold, n_tokens=given.cold),
        (f"1 stream of {given.outputs} tokens after {given.prompt:,} cached ones", "tokens/s"): partial(
            Running.streams, prompts=[prompt], n_outputs=given.outputs
        ),
    }
    for server in servers:
        server.streams([server.prompt(64)], 8)
    for (name, unit), figure in work.items():
        name = f"{kind}: {name}"
        figures = measure.in_turns({one.name: partial(figure, one) for one in servers}, given.repeats, warm_up=False)
        yield from (Row(f"{name}: {server}", unit, values) for server, values in figures.items())
        yield from (replace(row, goal=f">= {MIN_SPEED}") for row in compared(name, unit, figures))
    yield from (Row(f"{kind}: resident at its peak: {one.name}", "MB", [one.resident_mb("VmHWM")]) for one in servers)


def options() -> argparse.Namespace:
    parser = servers_parser(__doc__, "file_peers")
    parser.add_argument(
        "--types", type=lambda text: tuple(text.split(",")), default=TYPES, help="of the files' tensors"
    )
    parser.add_argument("--files", type=Path, help="folder that keeps the files")
    parser.add_argument("--processor", choices=had(), default=had()[-1], help="what Headwater's kernels may use")
    parser.add_argument("--cold", type=int, default=512, help="length of cold prompts, tokens")
    parser.add_argument("--prompt", type=int, default=512, help="tokens that are cached before a stream")
    parser.add_argument("--outputs", type=int, default=64, help="tokens of a stream")
    given = servers_read(parser)
    vars(given).update(SMALL if given.small else {}, streams=(1,))
    os.environ.update(ENVIRONMENTS[given.processor][0])  # servers take over
    return given


def main() -> None:
    given, rows = options(), list[Row]()
    with ExitStack() as stack:
        model = given.model or stack.enter_context(bench_checkpoint())
        folder = given.files or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        words = sayable(Tokenizer.from_file(str(model / "tokenizer.json")))
        for kind in given.types:
            file = file_of(kind, model, folder)
            wanted = [Wanted("headwater", str(ROOT), file, ())]
            wanted += [Wanted("llama.cpp", "llama.cpp", file, ())] if given.peers else []
            with ExitStack() as of_type:
                servers = [of_type.enter_context(started(one, given, words)) for one in wanted]
                for row in rows_of(kind, servers, given):
                    print(f"{row.name}, {row.unit}: {row.values}", flush=True)
                    rows.append(row)
    report(given, rows, servers, model=model.name, processor=given.processor)


if __name__ == "__main__":
    main()
