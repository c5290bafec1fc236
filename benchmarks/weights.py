"""Cost of weights in fewer bits: next tokens on the decode path and on the prefill path, and right answers.

    python -m benchmarks.weights [--items 100] [--small]

Windows of held-out prompts go through the embedded model twice: token by token through decode rows, after a first part
that is prefilled, and in one prefill. Each path is compared with the same path of the model with weights as stored. The
control decodes with weights of 2 bits after a prefill with those as stored: it has to show on the decode path alone.
GGUF files of the model are written by the tests' converter, weights of other forms are rounded by
`benchmarks.weight_forms`, also by llama.cpp's quantiser if VENV_LLAMA names an environment that has it. `headwater
eval` asks a server with each format of `--weights`. A repetition would give the same figures: there is one.

W windows, T tokens of each, P positions that are scored, V vocabulary.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.weight_forms import all_forms, rounded_to
from headwater.cli import run
from headwater.evaluate.summary import Estimate, estimate
from headwater.lab.fidelity.prompts import Prompts
from headwater.models.files import embedded
from headwater.models.hybrid import HybridModel
from headwater.models.load import LoadedModel, load_model
from headwater.models.quantiser import BITS
from headwater.spec import WEIGHTS
from headwater.table import Table
from papers.results import write_results
from tests.gguf_files.convert import convert
from tests.support import Bench

WINDOWS, TOKENS, PREFILLED = 16, 320, 64
SMALL = 1, 96  # windows and tokens that only show that it runs
CONTROL_BITS = 2
CONTROL = f"{CONTROL_BITS} bits in decode rows alone (control)"
# by name, the types of products in a GGUF file whose inputs are no blocks of 256, and of those whose inputs are
TYPES = {
    "GGUF Q8_0": ("Q8_0", "Q8_0"),
    "GGUF Q4_0": ("Q4_0", "Q4_0"),
    "GGUF Q6_K": ("Q8_0", "Q6_K"),
    "GGUF Q5_K": ("Q5_1", "Q5_K"),
    "GGUF Q4_K": ("Q5_0", "Q4_K"),
}
BLOCKS_OF_256 = "ffn_down.weight"  # of the embedded model, which is 192 channels wide


@dataclass(frozen=True, slots=True)
class Models:
    """The models that compute rows of prefill and rows of decoding sequences; they are one outside of the control."""

    prefill: HybridModel
    decode: HybridModel


@dataclass(frozen=True, slots=True)
class Column:
    """One path of one format of weights against the same path with weights as stored."""

    positions: int
    divergence: Estimate  # KL in nats of the next tokens, by window
    perplexity: float
    same_first: float  # share of positions with the same most likely token


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of the table."""

    decode: Column
    prefill: Column


def windows_of(loaded: LoadedModel, count: int, tokens: int, seed: int = 0) -> Tensor:
    """Return the beginnings of held-out prompts, [W, T]; raises ValueError if fewer are long enough."""
    prompts = Prompts(loaded).sampled(20 * count, seed, loaded.spec.max_length)
    long = [prompt.tokens[:tokens] for prompt in prompts if len(prompt.tokens) >= tokens][:count]
    if len(long) < count:
        raise ValueError(f"{len(long)} prompts have {tokens} tokens, {count} are needed")
    return torch.tensor(long)


def through_decode(models: Models, token_WT: Tensor, prefilled: int = PREFILLED) -> Tensor:
    """Return logits [W, P, V] after each token from `prefilled` on but the last, all windows in each step."""
    n_windows, n_tokens = token_WT.shape
    pages = n_windows * -(-n_tokens // models.prefill.spec.page_size)
    bench = Bench(models.prefill, n_pages=pages, n_slots=n_windows)
    sequences = [bench.sequence(n_tokens) for _ in range(n_windows)]
    bench.step([(seq, row[:prefilled]) for seq, row in zip(sequences, token_WT.tolist(), strict=True)])
    bench.model = models.decode
    steps = token_WT[:, prefilled:-1].T.tolist()
    return torch.stack([bench.step([], list(zip(sequences, step, strict=True))) for step in steps], 1)


def through_prefill(models: Models, token_WT: Tensor, prefilled: int = PREFILLED) -> Tensor:
    """Return the same logits [W, P, V] from one prefill of each window."""
    n_windows, n_tokens = token_WT.shape
    pages = n_windows * -(-n_tokens // models.prefill.spec.page_size)
    bench = Bench(models.prefill, n_pages=pages, n_slots=n_windows)
    rows = (bench.prefill(bench.sequence(n_tokens), row)[prefilled:-1] for row in token_WT.tolist())
    return torch.stack(list(rows))


def column(logits_WPV: Tensor, stored_WPV: Tensor, token_WT: Tensor, prefilled: int = PREFILLED) -> Column:
    """Compare the logits of one path with those of weights as stored."""
    ours, stored = (logits.double().log_softmax(-1) for logits in (logits_WPV, stored_WPV))
    nats_WP = (stored.exp() * (stored - ours)).sum(-1)
    next_WP1 = token_WT[:, prefilled + 1 :, None]
    groups = torch.arange(len(token_WT)).repeat_interleave(nats_WP.shape[1])
    return Column(
        positions=nats_WP.numel(),
        divergence=estimate(nats_WP.flatten().tolist(), groups.tolist()),
        perplexity=float(ours.gather(-1, next_WP1).mean().neg().exp()),
        same_first=float((ours.argmax(-1) == stored.argmax(-1)).double().mean()),
    )


def measured(folder: Path, count: int = WINDOWS, tokens: int = TOKENS) -> dict[str, Measured]:
    """Return the row of each format of weights, those as stored first, and of the control."""
    stored = load_model(folder, "float32")
    token_WT = windows_of(stored, count, tokens)
    found = {}
    paths = (through_decode, through_prefill)
    as_stored: list[Tensor] = []
    for name, models in all_models(folder, stored.model):
        logits = [path(models, token_WT) for path in paths]
        as_stored = as_stored or logits
        found[name] = Measured(*(column(ours, one, token_WT) for ours, one in zip(logits, as_stored, strict=True)))
    return found


def all_models(folder: Path, stored: HybridModel) -> Iterator[tuple[str, Models]]:
    """Yield each row's name and models."""
    yield "as stored, 16 bits", Models(stored, stored)
    for weights in WEIGHTS[1:]:
        model = load_model(folder, "float32", weights=weights).model
        yield weights, Models(model, model)
    with tempfile.TemporaryDirectory() as scratch:
        for name, (others, of_256) in TYPES.items():
            file = convert(folder, Path(scratch) / f"{name}.gguf", others, {BLOCKS_OF_256: of_256})
            model = load_model(file, "float32").model
            yield name, Models(model, model)
    for name, form in all_forms().items():
        with rounded_to(form):
            model = load_model(folder, "float32", weights="int4").model
        yield name, Models(model, model)
    with patch.dict(BITS, int4=CONTROL_BITS):
        yield CONTROL, Models(stored, load_model(folder, "float32", weights="int4").model)


def exact_matches(items: int) -> dict[str, Estimate]:
    """Return the exact match of `headwater eval` with each format of weights."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for weights in WEIGHTS:
            out = Path(scratch) / f"{weights}.json"
            code = run(["eval", "--weights", weights, "--limit", str(items), "--json", str(out)])
            if code:
                raise SystemExit(code)
            (columns,) = json.loads(out.read_text(encoding="utf-8"))["columns"].values()
            found[weights] = Estimate(**columns["all"][0]["exact"])
    return found


def records(rows: Mapping[str, Measured], exact: Mapping[str, Estimate]) -> list[dict[str, Any]]:
    """Return a record of each form of weights, for the results file."""
    names = dict(zip(rows, WEIGHTS, strict=False))
    found = []
    for name, row in rows.items():
        right = exact.get(names.get(name, ""))
        found.append({"weights": name, **asdict(row), "exact": None if right is None else asdict(right)})
    return found


def main() -> None:
    parser = measure.parser(__doc__, "weights", repeats=1)
    parser.add_argument("--items", type=int, default=100, help="items that `headwater eval` asks; 0: none")
    given = measure.prepared(parser)
    items, sizes = (1, SMALL) if given.small else (given.items, (WINDOWS, TOKENS))
    rows = measured(embedded(), *sizes)
    found = records(rows, exact_matches(items) if items else {})
    run = {**measure.machine(), "repeats": given.repeats, "items": items, "windows": sizes[0], "tokens": sizes[1]}
    write_results(given.out, {"run": run, "forms": found}, seed=given.seed, small=given.small)
    table = Table("weights", ("weights",), ("decode: KL", "prefill: KL", "decode: same first token"))
    for name, row in rows.items():
        kl = (f"{one.divergence.mean:.2e}" for one in (row.decode, row.prefill))
        table.add_row(name, *kl, f"{row.decode.same_first:.1%}")
    measure.console().print(table)


if __name__ == "__main__":
    main()
