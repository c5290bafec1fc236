"""`python -m training`: trains the recipe into a folder, or continues where an earlier run stopped."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

from training.machine import settle

settle()

import torch  # noqa: E402

from training import tokenizer  # noqa: E402
from training.export import TOKENIZER, adopt, export  # noqa: E402
from training.loop import Training, progress  # noqa: E402
from training.model import compiled  # noqa: E402
from training.recipe import RECIPES  # noqa: E402
from training.tasks.example import KINDS  # noqa: E402
from training.tasks.text import passages  # noqa: E402

SHOWN_EVERY = 20  # steps


def told(entries: list[dict[str, Any]]) -> str:
    """Means of the log's figures; shares of right answers are weighted by the number of answers."""
    shown = {"loss": sum(e["loss"] for e in entries) / len(entries)} if "loss" in entries[0] else {}
    for kind in KINDS:
        n = sum(e.get(f"n_{kind}", 0) for e in entries)
        if n:
            shown[kind] = sum(e.get(f"n_{kind}", 0) * e.get(f"right_{kind}", 0) for e in entries) / n
    return "  ".join(f"{name} {value:.3f}" for name, value in shown.items())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training", description="Train a small hybrid model.")
    parser.add_argument("--recipe", choices=RECIPES, default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run: tokenizer, state, log, checkpoint")
    parser.add_argument("--texts", type=Path, help="folder of plain text; without it a few paragraphs")
    parser.add_argument("--begin", type=Path, help="checkpoint whose weights and tokenizer a new run begins with")
    parser.add_argument("--until", type=int, help="stop after this step of the recipe")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="needs a C++ compiler")
    options = parser.parse_args()

    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    if options.compile:
        compiled()
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = RECIPES[options.recipe]
    file = options.out / TOKENIZER
    if options.begin is not None and not file.exists():
        shutil.copyfile(options.begin / TOKENIZER, file)
    if not file.exists():
        texts = passages(options.texts) if options.texts else None
        tokenizer.train(texts, recipe.vocabulary, examples=recipe.tokenizer_examples).save(str(file))
    training = Training(recipe, options.out, options.device)
    if options.begin is not None and training.step == 0:
        adopt(training.model, options.begin)
    seconds = time.perf_counter()
    seen: list[dict[str, Any]] = []
    for entry in training.run(options.texts, options.until):
        seen.append(entry)
        if entry["step"] % SHOWN_EVERY == 0:
            speed = sum(e["tokens"] for e in seen) / (time.perf_counter() - seconds)
            print(progress(entry["step"], training.recipe, told(seen), speed), flush=True)
            seconds, seen = time.perf_counter(), []
        for row in entry.get("held_out", ()):
            print(f"held out  length {row['length']}  {told([row])}", flush=True)
    export(training.model, training.recipe, file, options.out / "checkpoint", torch.bfloat16)


if __name__ == "__main__":
    main()
