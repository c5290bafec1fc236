"""Findings of the self-check about a GPU's kernels, in Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="no Triton here: it comes with the test extra")

from headwater.engine.proof import gpu_check as kernel_check
from headwater.engine.proof import selfcheck
from headwater.engine.proof.selfcheck import self_check
from headwater.layers.gdn import DeltaNet
from headwater.layers.kda import DeltaAttention
from headwater.layers.layer import Layer
from headwater.layers.mamba2 import Mamba2
from headwater.layers.short_conv import ShortConv
from headwater.mixers.gpu import attention as paged_attention
from headwater.mixers.gpu import experts, recurrent
from headwater.mixers.gpu import mla as latent_attention
from headwater.mixers.gpu.mamba2 import StateSpaceDualKernels
from headwater.mixers.weights import Weights
from headwater.models.build import RECURRENT
from headwater.spec import ModelSpec
from tests.engine.proof.test_selfcheck import latent_spec, spec

WIDTH = 32
LAYERS = (
    DeltaNet(WIDTH, 1, 1, 16, 16, 4),
    DeltaAttention(WIDTH, heads=2, head_dim=16, conv=4),
    Mamba2(WIDTH, 2, 16, 16, 1, 4),
    ShortConv(WIDTH, conv=3),
)


@pytest.fixture(autouse=True)
def short_sequences(monkeypatch: pytest.MonkeyPatch, gpu_path: Callable[[bool], None]) -> None:
    gpu_path(True)
    monkeypatch.setattr(paged_attention, "SPLIT", 128)
    monkeypatch.setattr(kernel_check, "LENGTH", 137)
    monkeypatch.setattr(kernel_check, "LENGTHS", (1, 64, 65, 100, 128, 129, 140))


@pytest.fixture
def small() -> ModelSpec:
    return spec()


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leave out checks of products and of whole layers, which take most of the time, and those of the given names."""

    def leave_out(*names: str) -> None:
        for checks in ("_product_checks", "_chain_checks"):
            monkeypatch.setattr(selfcheck, checks, lambda *_: [])
        for name in names:
            monkeypatch.setattr(kernel_check, name, lambda *_: iter(()))

    return leave_out


@pytest.mark.full
def test_the_kernels_of_a_gpu_are_found_deterministic(small: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: set[str] = set()
    for module, name in ((paged_attention, "prefill"), (paged_attention, "decode"), (recurrent, "convolve")):
        kernel = getattr(module, name)

        def noted(*given: object, kernel: Callable[..., object] = kernel, **named: object) -> object:
            ran.add(kernel.__qualname__)
            return kernel(*given, **named)

        monkeypatch.setattr(module, name, noted)
    check = self_check(small)
    assert check.deterministic, check.broken_by
    assert ran == {"prefill", "decode", "convolve"}


def broken(layer: Layer) -> list[str]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {name: random(*shape) * WIDTH**-0.5 for name, shape in layer.tensors().items()}
    mixer = RECURRENT[type(layer)](layer, Weights(tensors))
    return list(kernel_check.broken_recurrence(layer, mixer, random, "cpu"))


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.kind)
def test_recurrences_are_found_deterministic(layer: Layer) -> None:
    assert broken(layer) == []


def test_a_recurrence_that_depends_on_its_company_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = StateSpaceDualKernels.prefill

    def odd(self: StateSpaceDualKernels, mixed_PC: torch.Tensor, gates, state, ragged) -> torch.Tensor:
        return prefill(self, mixed_PC, gates, state, ragged) * (1 + (len(ragged.first_S) == 2))

    monkeypatch.setattr(StateSpaceDualKernels, "prefill", odd)
    assert broken(LAYERS[2]) == [f"mamba2 cut at {cut} tokens, in company" for cut in (64, 128)]


def test_decoding_that_depends_on_its_company_is_named_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = StateSpaceDualKernels.decode
    monkeypatch.setattr(
        StateSpaceDualKernels, "decode", lambda self, mixed, *rest: decode(self, mixed, *rest) * (1 + (len(mixed) == 3))
    )
    assert set(broken(LAYERS[2])) == {"mamba2 at 3 decoding sequences"}


@pytest.mark.parametrize(
    ("name", "broken_by"),
    [("prefill", "attention cut at 128 tokens, in company"), ("decode", "attention at 2 decoding sequences")],
)
def test_paged_attention_that_depends_on_its_company_is_named(
    small: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
    without: Callable[..., None],
    name: str,
    broken_by: str,
) -> None:
    without()
    kernel, odd = getattr(paged_attention, name), {"prefill": 128, "decode": 2}[name]
    monkeypatch.setattr(paged_attention, name, lambda q, *a, **n: kernel(q, *a, **n) * (1 + (len(q) == odd)))
    assert self_check(small).broken_by == broken_by


def test_latent_attention_that_depends_on_its_company_is_named(
    monkeypatch: pytest.MonkeyPatch, without: Callable[..., None]
) -> None:
    without("broken_attention")
    kernel = latent_attention.decode
    monkeypatch.setattr(latent_attention, "decode", lambda q, *rest: kernel(q, *rest) * (1 + (len(q) == 3)))
    assert self_check(latent_spec()).broken_by == "latent_attention at 3 decoding sequences"


@pytest.mark.full
def test_latents_and_experts_are_found_deterministic() -> None:
    assert self_check(latent_spec()).deterministic


def test_experts_that_depend_on_their_company_are_named(
    monkeypatch: pytest.MonkeyPatch, without: Callable[..., None]
) -> None:
    product = experts.routed_product
    without("broken_attention", "broken_latent_attention")
    monkeypatch.setattr(experts, "routed_product", lambda x, *rest: product(x, *rest) * (1 + (len(x) == 2)))
    assert self_check(latent_spec()).broken_by == "moe at 2 decoding sequences"
