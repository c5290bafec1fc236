"""The self-check of decode kernels names what depends on company or threads, and nothing else."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

from headwater.engine.proof.cpu_checks import broken_decode, broken_prefill
from headwater.kernels.compiling import threads_in_use, use_threads
from headwater.layers.gdn import DeltaNet
from headwater.mixers.batch import StepBatch
from headwater.mixers.cpu.recurrent import GatedDeltaNetKernel
from headwater.mixers.gdn import GatedDeltaNet
from headwater.mixers.slices import CHUNK
from headwater.mixers.weights import Weights

LAYER = DeltaNet(64, 2, 4, 16, 24, 4)
Change = Callable[[torch.Tensor], object]  # of what a kernel wrote


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = threads_in_use()
    use_threads(2)
    yield
    use_threads(before)


def found(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, change: Change, layer: DeltaNet = LAYER) -> list[str]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    whole = GatedDeltaNetKernel.decode_into

    def changed(self: GatedDeltaNetKernel, out_BX: torch.Tensor, *rest: object) -> None:
        whole(self, out_BX, *rest)
        change(out_BX)

    monkeypatch.setattr(GatedDeltaNetKernel, "decode_into", changed)
    mixer = GatedDeltaNet(layer, Weights({name: random(*shape).float() for name, shape in layer.tensors().items()}))
    with torch.inference_mode():
        return [*broken_decode(layer, mixer, random), *broken_prefill(layer, mixer, random)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_found_exact(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    assert found(monkeypatch, dtype, lambda out_BX: None) == []


def test_a_kernel_that_depends_on_its_company_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = found(monkeypatch, torch.float32, lambda out_BX: out_BX.add_(len(out_BX) == 2))
    assert names == ["gated_delta_net at 2 sequences that a kernel decodes"]


def test_a_kernel_that_depends_on_the_number_of_threads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = found(monkeypatch, torch.float32, lambda out_BX: out_BX.add_(threads_in_use() == 1))
    assert names == ["gated_delta_net on 1 of 2 threads of a kernel"]


def test_a_kernel_that_mixes_tokens_of_a_sequence_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state restarts with each row: tokens of a step are computed as if each were another sequence's."""
    whole = StepBatch.decode_sequences.func

    def each_its_own(batch: StepBatch) -> tuple[Any, ...]:
        at_once = len(batch.parents) == 7 and not batch.drafted
        return (np.arange(6, -1, -1), np.arange(8), np.arange(1, 8)) if at_once else whole(batch)

    monkeypatch.setattr(StepBatch, "decode_sequences", property(each_its_own))
    names = found(monkeypatch, torch.float32, lambda out_BX: None)
    assert names == ["gated_delta_net at 3 tokens of a sequence that a kernel decodes in one step"]


def test_a_kernel_whose_drafts_advance_the_state_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StepBatch.decode_sequences.func

    def one_too_far(batch: StepBatch) -> tuple[Any, ...]:
        slots, firsts, drafts = whole(batch)
        return slots, firsts, np.minimum(drafts + 1, firsts[1:])

    monkeypatch.setattr(StepBatch, "decode_sequences", property(one_too_far))
    names = found(monkeypatch, torch.float32, lambda out_BX: None)
    assert names == ["gated_delta_net at 2 drafts of a sequence, of which one is accepted"]


WIDE = DeltaNet(64, 2, 4, 16, 32, 4)  # widths of whole vectors, which a kernel prefills


def found_in_prefill(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, change: Change) -> list[str]:
    whole = GatedDeltaNetKernel.prefill_into

    def changed(self: GatedDeltaNetKernel, out_NX: torch.Tensor, *rest: object) -> None:
        whole(self, out_NX, *rest)
        change(out_NX)

    monkeypatch.setattr(GatedDeltaNetKernel, "prefill_into", changed)
    return found(monkeypatch, dtype, lambda out_BX: None, WIDE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_that_prefills_is_found_exact(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    assert found_in_prefill(monkeypatch, dtype, lambda out_NX: None) == []


def test_a_kernel_that_prefills_and_depends_on_its_company_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = found_in_prefill(monkeypatch, torch.float32, lambda out_NX: out_NX.add_(len(out_NX) == 3))
    assert names == ["gated_delta_net at one of 3 prompts that a kernel prefills"]


def test_a_kernel_that_depends_on_how_a_prompt_is_cut_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = found_in_prefill(monkeypatch, torch.float32, lambda out_NX: out_NX.add_(len(out_NX) == 2 * CHUNK + 3))
    assert names == ["gated_delta_net at prompts that a kernel prefills in 2 steps"]


def test_a_kernel_that_prefills_and_depends_on_threads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = found_in_prefill(monkeypatch, torch.float32, lambda out_NX: out_NX.add_(threads_in_use() == 1))
    assert names == ["gated_delta_net on 1 of 2 threads of a kernel that prefills"]
