"""How fast does the model prefill and decode, and how does prefill compare with transformers on the same checkpoint?

    python benchmarks/prefill.py [--tokens 2048] [--repeats 5] [--threads 2]

Both sides run in turns within one process. The row holds medians, minima and spread in seconds, and tokens/s.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from headwater.mixers.numerics import prepare_process
from headwater.models.load import LoadedModel, load_model
from headwater.models.tiny.tokenizer import sayable

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests import checkpoints  # noqa: E402
from tests.support import Bench  # noqa: E402

SEED = 0
DECODE_STEPS = 16


def seconds(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Each piece of work in turns, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def summary(times: list[float], tokens: int) -> dict[str, float]:
    low, middle, high = min(times), statistics.median(times), max(times)
    return {
        "min_s": round(low, 5),
        "median_s": round(middle, 5),
        "max_s": round(high, 5),
        "tokens_per_s": round(tokens / middle, 1),
    }


def prefill_work(loaded: LoadedModel, folder: Path, tokens: list[int]) -> dict[str, Callable[[], object]]:
    """A cold prefill that ends in one row of logits, here and in transformers."""
    oracle = checkpoints.oracle(folder, getattr(torch, loaded.spec.dtype_name))
    batch = torch.tensor([tokens])
    bench = Bench(loaded.model, n_pages=len(tokens) // 64 + 2)
    seq = bench.sequence(len(tokens))

    def ours() -> torch.Tensor:
        seq.length = 0
        bench.states.zero(seq.slot)
        return bench.step([(seq, tokens)])

    def theirs() -> torch.Tensor:
        with torch.inference_mode():
            return oracle(batch, logits_to_keep=1).logits

    return {"headwater": ours, "transformers": theirs}


def decode_work(loaded: LoadedModel, tokens: list[int], sizes: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """`DECODE_STEPS` steps at each batch size, always from the same context length."""
    pages = len(tokens) // 64 + 2
    bench = Bench(loaded.model, n_pages=max(sizes) * pages)
    seqs = [bench.sequence(len(tokens) + DECODE_STEPS + 1) for _ in range(max(sizes))]
    for seq in seqs:
        bench.step([(seq, tokens)])

    def run(size: int) -> None:
        for _ in range(DECODE_STEPS):
            bench.step([], [(seq, tokens[0]) for seq in seqs[:size]])
        for seq in seqs[:size]:
            seq.length -= DECODE_STEPS

    return {f"batch {size}": lambda size=size: run(size) for size in sizes}


def measure(folder: Path, dtype: str, n_tokens: int, repeats: int) -> dict[str, object]:
    loaded = load_model(folder, dtype)
    tokens = random.Random(SEED).choices(sayable(loaded.tokenizer), k=n_tokens)
    prefill = seconds(prefill_work(loaded, folder, tokens), repeats)
    row: dict[str, object] = {"dtype": dtype, "prefill_tokens": n_tokens}
    row["prefill"] = {name: summary(times, n_tokens) for name, times in prefill.items()}
    ratios = [b / a for a, b in zip(prefill["headwater"], prefill["transformers"], strict=True)]
    row["prefill_ratio"] = {"min": round(min(ratios), 2), "median": round(statistics.median(ratios), 2)}
    sizes = (1, 8)
    for context in (512, 8192):
        times = seconds(decode_work(loaded, (tokens * 8)[:context], sizes), repeats)
        named = {f"batch {size}": summary(times[f"batch {size}"], size * DECODE_STEPS) for size in sizes}
        row[f"decode at {context}"] = named
        gains = [8 * one / eight for one, eight in zip(times["batch 1"], times["batch 8"], strict=True)]
        row[f"decode gain at {context}"] = {"min": round(min(gains), 2), "median": round(statistics.median(gains), 2)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "prefill.json")
    args = parser.parse_args()
    prepare_process(args.threads)
    with tempfile.TemporaryDirectory() as root:
        folder = checkpoints.checkpoint(Path(root), "qwen3_5_bench")
        rows = [measure(folder, dtype, args.tokens, args.repeats) for dtype in args.dtype or ("float32", "bfloat16")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    about = {
        "commit": commit.strip(),
        "machine": f"{platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "threads": args.threads,
        "seed": SEED,
        "repeats": args.repeats,
        "checkpoint": "hidden 512, 8 layers (6 Gated DeltaNet, 2 attention), vocabulary 2048",
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n")
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
