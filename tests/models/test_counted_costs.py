"""Costs of a spec, compared with computed operations and with allocated and stored bytes."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from headwater import kernels
from headwater.layers.attention import WindowAttention
from headwater.layers.mla import LatentAttention
from headwater.memory.arena import Arena
from headwater.mixers import numerics
from headwater.mixers.batch import StepBatch
from headwater.mixers.numerics import Numerics
from headwater.mixers.slices import Slice
from headwater.models.load import LoadedModel, load_model
from headwater.spec import ModelSpec
from tests.checkpoints import RECIPES, SMALLEST
from tests.contract.recurrences import RECURRENCES, Case
from tests.contract.test_mixer_costs import one_token
from tests.counter import PLAIN, counted
from tests.support import Bench

PROMPT = 1024  # tokens: two blocks of keys, and no rows that are only there to fill one up
FROM_THE_CONFIG = (
    "slope_rate",
    "query_decay",
    "key_decay",
    "diagonal_decay",
    "_scales",
)  # MiniMax's decays, MXFP4's scales
POISON = -1  # of 4-byte words: a NaN that nothing computes
NONE = torch.empty(0, dtype=torch.int64)
PAGE = 64


@pytest.fixture(autouse=True)
def _in_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute everything with torch's operations, which are those that are counted."""
    monkeypatch.setattr(kernels, "available", lambda: False)
    numerics.use(PLAIN)
    yield
    numerics.use(Numerics())


def recipes() -> Iterator[Any]:
    """The smallest of each family and one with windows; the others in `make test-full`."""
    for name in RECIPES:
        small = name in SMALLEST.values() or name == "qwen3_window"
        yield pytest.param(name, marks=[] if small else [pytest.mark.full])


@pytest.fixture(params=recipes())
def folder(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint(request.param)


def recurrence_flops(spec: ModelSpec) -> int:
    """Return the FLOPs of one token in all layers' recurrences, by their references, without products with weights."""
    kinds = {type(next(iter(r.shapes.values()))): r for r in RECURRENCES.values()}
    layers = [layer for layer in spec.layers if type(layer) in kinds]
    return sum(one_token(Case(layer, kinds[type(layer)])).others for layer in layers)


def beyond_the_start(spec: ModelSpec) -> int:
    """FLOPs of windows that count as full from the first token on."""
    windows = [layer for layer in spec.layers if isinstance(layer, WindowAttention)]
    return sum(4 * w.heads * w.head_dim * w.window * (w.window - 1) // 2 for w in windows)


def test_flops_of_prefill_and_decode_equal_the_counted_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = random.Random(0).choices(range(500), k=PROMPT)
    with counted(monkeypatch) as flops:
        loaded = load_model(folder, "float32")
        bench = Bench(loaded.model)
        sequence = bench.sequence(PROMPT + 1)
        bench.step([(sequence, tokens)])
        prefill = flops.total
        bench.step([], [(sequence, 7)])
    spec, recurrent = loaded.spec, recurrence_flops(loaded.spec)
    assert prefill + PROMPT * recurrent == spec.prefill_flops(0, PROMPT) - beyond_the_start(spec)
    if not any(
        isinstance(layer, LatentAttention) for layer in spec.layers
    ):  # which decodes among latents, in another way
        assert flops.total - prefill + recurrent == spec.prefill_flops(PROMPT, PROMPT + 1)


def test_weights_are_those_of_the_checkpoints_file(folder: Path) -> None:
    stored: dict[str, int] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            stored |= {name: tensors.get_tensor(name).numel() for name in tensors.keys()}  # noqa: SIM118
    stored |= {name: 2 * n for name, n in stored.items() if name.endswith("_blocks")}  # of MXFP4, two codes a byte
    weights = sum(n for name, n in stored.items() if not name.endswith(FROM_THE_CONFIG))
    assert sum(load_model(folder).spec.parameters_by_kind().values()) == weights


def test_token_writes_the_kv_bytes_of_the_spec(folder: Path) -> None:
    """One page of tokens is prefilled in an arena full of poison: other content was written."""
    loaded = load_model(folder, "float32")
    bench = Bench(loaded.model, poison=True)
    bench.step([(bench.sequence(PAGE), list(range(PAGE)))])
    words = bench.arena.pages.view(torch.int32)
    assert 4 * int((words != POISON).sum()) == PAGE * loaded.spec.kv_bytes_per_token
    assert Arena(loaded.spec, 3).pages.nbytes == 3 * loaded.spec.page_bytes


def test_checkpoint_has_the_bytes_of_the_spec(folder: Path) -> None:
    """States after one page are saved to a row full of poison: other content was written."""
    loaded = load_model(folder, "float32")
    spec, bench = loaded.spec, Bench(loaded.model)
    kept = bench.n_slots - 1
    bench.states.bytes_RB[kept] = 0xFF
    _prefill_a_page(loaded, bench, kept)
    written = (bench.states.bytes_RB[kept].view(torch.int32) != POISON).nonzero().flatten()
    elements = sum(sum(layer.state_elements.values()) for layer in spec.layers)
    assert len(written) == elements
    assert 4 * elements <= spec.checkpoint_bytes
    assert not elements or 4 * (int(written[-1]) + 1) == spec.checkpoint_bytes


def _prefill_a_page(loaded: LoadedModel, bench: Bench, kept: int) -> None:
    sequence = bench.sequence(PAGE)
    one = Slice(0, PAGE, 0, sequence.slot, sequence.table, 0, ((PAGE, kept),))
    batch = StepBatch(torch.arange(PAGE), torch.arange(PAGE), (one,), NONE, (), torch.tensor([PAGE - 1]))
    loaded.model.forward(batch, bench.arena, bench.states)
