"""Cost of weights in fewer bits: next tokens on the decode path and on the prefill path, and right answers.

    python -m benchmarks.weights [--items 100] [--page build/weights.md] [--small]

Windows of held-out prompts go through the embedded model twice: token by token through decode rows, after a first part
that is prefilled, and in one prefill. Each path is compared with the same path of the model with weights as stored. The
control decodes with weights of 2 bits after a prefill with those as stored: it has to show on the decode path alone.
GGUF files of the model are written by the tests' converter. `headwater eval` asks a server with each format of
`--weights`. Writes the section of a page if one is named. A repetition
would give the same figures: there is one.

W windows, T tokens of each, P positions that are scored, V vocabulary.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.measure import Row
from headwater.cli import run
from headwater.cli.common import prepare_outputs
from headwater.evaluate.summary import Estimate, estimate
from headwater.lab.fidelity.prompts import Prompts
from headwater.models.files import embedded
from headwater.models.hybrid import HybridModel
from headwater.models.load import LoadedModel, load_model
from headwater.models.quantiser import BITS
from headwater.spec import WEIGHTS
from papers.results import commit_of
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
HEADING = "## Quality\n"
ABOUT = f"""{HEADING}
`python -m benchmarks.weights --page build/weights.md` writes this section. The embedded model computes in float32, with weights as they are stored
(bfloat16) and as `--weights` quantises them. {{positions:,}} tokens of held-out prompts are forced through decode rows:
{WINDOWS} windows, after {PREFILLED} tokens each that are prefilled. The prefill columns score the same tokens in one prefill. Each
path is compared with the same path of weights as stored: the mean divergence (KL) of next tokens in nats, with its 95% interval
over windows, and the perplexity of the text. Exact match is that of `headwater eval --limit {{items}}`, with its interval. The
control shows that the decode columns measure decode rows: it decodes with {CONTROL_BITS} bits after a prefill as stored.

GGUF files are written by the tests' converter, without an importance matrix; embedding and head are of the type, too. The embedded
model is 192 channels wide, and blocks of K types have 256 inputs: only `ffn_down` (512 inputs) has them, other products the type that
llama.cpp falls back to (Q8_0 for Q6_K, Q5_1 for Q5_K, Q5_0 for Q4_K). `headwater eval` is not run on the files.
"""  # noqa: E501
COLUMNS = ("weights", "decode: KL", "decode: perplexity", "prefill: KL", "prefill: perplexity")
COLUMNS += ("same first token, decode", "exact match %")


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


def section(rows: Mapping[str, Measured], exact: Mapping[str, Estimate], items: int) -> str:
    """Return the section of the page."""
    names = dict(zip(rows, WEIGHTS, strict=False))
    first = next(iter(rows.values()))
    machine = measure.machine()
    lines = [
        ABOUT.format(positions=first.decode.positions, items=items),
        f"| {' | '.join(COLUMNS)} |",
        "| --- " * len(COLUMNS) + "|",
        *(row_of(name, row, exact.get(names.get(name, ""))) for name, row in rows.items()),
        f"\nMeasured on {datetime.now(UTC):%Y-%m-%d}, {machine['cpu']}, commit {commit_of(machine)}.",
    ]
    return "\n".join(lines) + "\n"


def row_of(name: str, row: Measured, exact: Estimate | None) -> str:
    cells = [name]
    for one in (row.decode, row.prefill):
        cells += [interval(one.divergence, ".2e") if one.divergence.mean else "0", f"{one.perplexity:.4f}"]
    cells.append(f"{row.decode.same_first:.1%}")
    cells.append(interval(exact, ".1f", 100) if exact else "")
    return f"| {' | '.join(cells)} |"


def interval(one: Estimate, form: str, factor: float = 1.0) -> str:
    """Format a mean with its interval."""
    mean = f"{factor * one.mean:{form}}"
    if one.low is None or one.high is None:
        return mean
    return f"{mean} [{factor * one.low:{form}}, {factor * one.high:{form}}]"


def with_section(page: str, new: str) -> str:
    """Return the page with the section replaced, or added at its end."""
    before, found, rest = page.partition(f"\n{HEADING}")
    if not found:
        return f"{page.rstrip()}\n\n{new}"
    after = re.search(r"^## ", rest, re.M)
    return f"{before}\n{new}" + (f"\n{rest[after.start() :]}" if after else "")


def figures(rows: Mapping[str, Measured], exact: Mapping[str, Estimate]) -> list[Row]:
    """Return the same figures as rows of `make bench`."""
    found = []
    names = dict(zip(rows, WEIGHTS, strict=False))
    for name, row in rows.items():
        for path, one in (("decode", row.decode), ("prefill", row.prefill)):
            found.append(Row(f"{name}, {path}: KL of next tokens", "nats", [one.divergence.mean]))
            found.append(Row(f"{name}, {path}: perplexity", "", [one.perplexity]))
        if right := exact.get(names.get(name, "")):
            found.append(Row(f"{name}: exact match", "%", [100 * right.mean]))
    return found


def main() -> None:
    parser = measure.parser(__doc__, "weights", repeats=1)
    parser.add_argument("--items", type=int, default=100, help="items that `headwater eval` asks")
    parser.add_argument("--page", type=Path, help="page whose section is written")
    given = measure.prepared(parser)
    prepare_outputs(given.page)
    items, sizes = (1, SMALL) if given.small else (given.items, (WINDOWS, TOKENS))
    rows = measured(embedded(), *sizes)
    exact = exact_matches(items)
    if given.page:
        page = given.page.read_text(encoding="utf-8") if given.page.exists() else ""
        given.page.write_text(with_section(page, section(rows, exact, items)), encoding="utf-8")
    measure.report(given, figures(rows, exact), items=items, windows=sizes[0], tokens=sizes[1])


if __name__ == "__main__":
    main()
