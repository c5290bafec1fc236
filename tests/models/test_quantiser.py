"""Weights rounded to 8 and 4 bits: chosen form, remaining error, and weights that are never rounded."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headwater.errors import CheckpointError
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.gdn import DeltaNet
from headwater.layers.lightning import Lightning
from headwater.layers.mamba2 import Mamba2
from headwater.mixers.gdn import GatedDeltaNet
from headwater.mixers.lightning import LightningAttention
from headwater.mixers.linear import Linear
from headwater.mixers.mamba2 import StateSpaceDual
from headwater.mixers.quantised import Quantised
from headwater.mixers.weights import Weights
from headwater.models import quantiser
from headwater.models.load import load_model
from headwater.models.quantiser import Form, QuantisedTensors, quantised
from headwater.spec import QUANTISED_BYTES
from tests.checkpoints.tokenizer import VOCAB
from tests.support import Bench

TOKENS = list(range(300, 400))


def gaussian(n_out: int = 48, n_in: int = 256, seed: int = 0) -> torch.Tensor:
    return 0.02 * torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(seed))


def of(weight: torch.Tensor, bits: int) -> Quantised:
    found = quantised(weight, bits)
    assert found is not None
    return found


def squared_error(weight: torch.Tensor, found: Quantised) -> float:
    return float((found.values().double() - weight.double()).square().sum())


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_value_is_within_half_a_step_of_its_weight_within_the_range(bits: int) -> None:
    """Weights beyond the lowest or highest value get that value, which is nearer to zero."""
    weight = gaussian()
    found = of(weight, bits)
    values, step = found.values(), found.scale_NX.float().abs().repeat_interleave(found.group, 1)
    cut_off = (values - weight).abs() > (0.5 + 2**-4) * step
    assert found.code_NK.max() == 2**bits - 1
    assert ((found.code_NK == 0) | (found.code_NK == 2**bits - 1))[cut_off].all()
    assert (values.abs() < weight.abs())[cut_off].all()
    assert cut_off.any() == (bits < 8)


def test_error_matches_the_number_of_bits() -> None:
    """Bound the relative squared error of Gaussian weights; a bit less is four times the error."""
    weight = gaussian(512, 1024)
    share = {bits: squared_error(weight, of(weight, bits)) / float(weight.square().sum()) for bits in (8, 4, 3)}
    assert share[8] < 3.2e-5
    assert share[4] < 8.2e-3
    assert share[3] > 3 * share[4] > 3 * 100 * share[8]


def test_form_with_the_least_error_is_chosen() -> None:
    for seed, weight in enumerate((gaussian(), gaussian().abs(), gaussian().exp(), gaussian().sign())):
        found = of(weight, 8)
        errors = {}
        for group in (128, 64):
            for has_zeros in (False, True):
                form = Form(group, has_zeros, found.scale_NX.dtype)
                errors[form] = float(form.grid(x := weight.unflatten(1, (-1, group)), 255).error(x).double().sum())
        least = min(errors.values())
        assert squared_error(weight, found) == pytest.approx(least, rel=1e-4), seed
        assert errors[Form(found.group, found.zero_NX.shape[1] > 1, found.scale_NX.dtype)] == pytest.approx(least)


def test_weights_that_a_small_form_holds_exactly_take_it() -> None:
    """Groups of 128 without zeros: codes times a power of two, with the lowest code in each group."""
    code_NK = torch.randint(-8, 8, (32, 256), generator=torch.Generator().manual_seed(0)).float()
    code_NK[:, ::128] = -8
    found = of(code_NK / 64, 4)
    assert (found.group, found.zero_NX.shape) == (128, (32, 1))
    assert torch.equal(found.values(), code_NK / 64)


def test_outlier_costs_only_its_group() -> None:
    """The first 64 inputs of a row have one large weight: groups of 64 keep the error of the others."""
    weight = gaussian(8, 128)
    weight[:, 3] = 5.0
    found = of(weight, 4)
    assert found.group == 64
    rest = (found.values() - weight)[:, 64:]
    assert float(rest.square().sum() / weight[:, 64:].square().sum()) < 0.02


def test_narrower_ranges_are_chosen_if_they_leave_less_error(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = gaussian(256, 512)
    narrowed = squared_error(weight, of(weight, 4))
    monkeypatch.setattr(quantiser, "RANGES", (1.0,))
    assert narrowed < 0.96 * squared_error(weight, of(weight, 4))


def test_rows_are_quantised_alike_in_blocks_and_by_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, threads = gaussian(64, 384).bfloat16(), torch.get_num_threads()
    whole = of(weight, 4)
    monkeypatch.setattr(quantiser, "BLOCK", 5 * 384)
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            again = of(weight, 4)
            assert torch.equal(again.code_NK, whole.code_NK)
            assert torch.equal(again.scale_NX, whole.scale_NX)
            assert torch.equal(again.zero_NX, whole.zero_NX)
    finally:
        torch.set_num_threads(threads)


def test_inputs_that_no_group_divides_are_not_quantised() -> None:
    assert quantised(gaussian(4, 96), 8) is None
    assert of(gaussian(4, 192), 8).group == 64


def test_zeros_stay_zeros() -> None:
    weight = gaussian(4, 128)
    weight[:2] = 0
    for bits in (8, 4):
        assert torch.equal(of(weight, bits).values()[:2], torch.zeros(2, 128))
        assert torch.equal(of(torch.zeros(2, 64), bits).values(), torch.zeros(2, 64))


@pytest.mark.parametrize("size", [1e-9, 1e-5, 1e-2, 1e3, 1e8])
def test_scales_that_float16_has_no_digits_for_are_float32(size: float) -> None:
    weight = gaussian() * size
    found = of(weight, 8)
    assert found.scale_NX.dtype == (torch.float16 if 1e-2 < size < 1e8 else torch.float32)
    assert squared_error(weight, found) / float(weight.double().square().sum()) < 4e-5


def test_row_of_tiny_weights_among_large_ones_loses_less_than_a_step() -> None:
    weight = gaussian(8, 128)
    weight[0] *= 1e-5
    found = of(weight, 8)
    assert found.scale_NX.dtype == torch.float16
    assert float((found.values() - weight)[0].abs().max()) < 2**-11 * float(found.scale_NX.max())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_with_their_name(value: float) -> None:
    layer = Mlp(64, 128)
    tensors = {name: torch.zeros(shape) for name, shape in layer.tensors().items()}
    tensors["up_proj.weight"][5, 7] = value
    held = QuantisedTensors(tensors, layer, 8)
    assert not Weights(held).stored("gate_proj.weight").any()
    with pytest.raises(CheckpointError, match=r"tensor 'up_proj\.weight' cannot be quantised: weights are not finite"):
        held["up_proj.weight"]


def changed(layer: DeltaNet | Mamba2 | Experts) -> dict[str, torch.Tensor]:
    """Whether each row of each tensor is rounded."""
    tensors = {name: torch.randn(shape) for name, shape in layer.tensors().items()}
    held = QuantisedTensors(tensors, layer, 4)
    assert list(held) == list(tensors)
    rows = {}
    for name, tensor in tensors.items():
        parts = stored if isinstance(stored := held[name], list) else [stored]
        whole = torch.cat([part if isinstance(part, torch.Tensor) else part.values() for part in parts])
        rows[name] = (whole.flatten(0, -2) != tensor.flatten(0, -2)).any(-1) if tensor.ndim > 1 else whole != tensor
    return rows


def test_gates_and_convolutions_of_gated_delta_net_keep_their_bits() -> None:
    rows = changed(DeltaNet(64, k_heads=2, v_heads=4, k_dim=32, v_dim=32, conv=4))
    whole = {name for name, changes in rows.items() if changes.all()}
    assert whole == {"in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight"}
    assert not any(changes.any() for name, changes in rows.items() if name not in whole)


def test_the_rows_of_mamba_2s_steps_keep_their_bits() -> None:
    layer = Mamba2(64, heads=4, head_dim=32, state=16, groups=1, conv=4)
    rows = changed(layer)["in_proj.weight"]
    assert rows[:-4].all()
    assert not rows[-4:].any()


def test_routers_keep_their_bits_and_experts_do_not() -> None:
    rows = changed(Experts(64, experts=4, per_token=2, intermediate=64, shared=64, shared_gate=True))
    kept = {name for name, changes in rows.items() if not changes.any()}
    assert kept == {"gate.weight", "shared_expert_gate.weight"}
    assert all(changes.all() for name, changes in rows.items() if name not in kept)


@pytest.mark.usefixtures("exact_rows")
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["headwater_tiny", "qwen3_next", "granite", "kimi_linear", "nemotron_h", "ring"])
def test_a_model_computes_with_the_values_of_the_codes(
    checkpoint: Callable[[str], Path], name: str, weights: str
) -> None:
    """Logits move by a little, and more with fewer bits."""
    moved = {}
    for held in ("auto", "int8", "int4"):
        loaded = load_model(checkpoint(name), "float32", weights=held)
        bench = Bench(loaded.model)
        moved[held] = bench.prefill(bench.sequence(len(TOKENS)), TOKENS)
    far = {held: float((moved[held] - moved["auto"]).norm() / moved["auto"].norm()) for held in ("int8", "int4")}
    assert 0 < far["int8"] < 0.1
    assert far["int8"] < far["int4"]


def layer_weights(shape: DeltaNet | Lightning | Mamba2) -> tuple[Weights, Weights]:
    """The weights of a layer as integers, and the values of these."""
    tensors = {name: 0.1 * torch.randn(size) for name, size in shape.tensors().items()}
    held = Weights(QuantisedTensors(tensors, shape, 8))
    values = {}
    for name in tensors:
        parts = held.parts(name) if name in shape.quantised() else [tensors[name]]
        values[name] = torch.cat([part if isinstance(part, torch.Tensor) else part.values() for part in parts])
    return held, Weights(values)


@pytest.mark.usefixtures("exact_rows")
@pytest.mark.parametrize(
    "shape",
    [
        DeltaNet(64, k_heads=2, v_heads=4, k_dim=32, v_dim=32, conv=4),
        DeltaNet(64, k_heads=2, v_heads=4, k_dim=32, v_dim=32, conv=4, by_key_head=True),
        Lightning(64, heads=2, head_dim=32, slopes=(0.5, 0.25)),
        Lightning(64, heads=2, head_dim=32, slopes=(0.5, 0.25), by_head=True, bias=True),
        Mamba2(64, heads=4, head_dim=32, state=16, groups=1, conv=4),
    ],
)
def test_products_of_several_formats_have_the_outputs_of_their_values(shape: DeltaNet | Lightning | Mamba2) -> None:
    """Fused, cut, reordered by heads, with parts that are quantised and parts that are not."""
    held, values = layer_weights(shape)
    projections: dict[type, Callable[[Weights], Linear]] = {
        DeltaNet: lambda weights: GatedDeltaNet(shape, weights).in_proj,
        Lightning: lambda weights: LightningAttention(shape, weights).qkv_proj,
        Mamba2: lambda weights: StateSpaceDual(shape, weights).in_proj,
    }
    ours, theirs = (projections[type(shape)](weights) for weights in (held, values))
    x_RK = torch.randn(5, 64)
    assert ours.n_out == theirs.n_out
    torch.testing.assert_close(ours(x_RK, 0), theirs(x_RK, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("exact_rows")
def test_neighbours_of_one_format_are_one_part() -> None:
    weight = gaussian(64, 128)
    eight, four, other = of(weight, 8), of(weight, 4), of(weight.sign(), 8)
    product = Weights({}).packed([eight, eight, weight, weight, weight.bfloat16(), four, eight, other])
    assert len(product._parts) == 6
    whole = torch.cat([eight.values()] * 2 + [weight] * 2 + [weight.bfloat16().float(), four.values(), eight.values()])
    x_RK = torch.randn(3, 128)
    expected = x_RK @ torch.cat([whole, other.values()]).T
    torch.testing.assert_close(product(x_RK, 0), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["headwater_tiny", "qwen3_next", "nemotron_h"])
def test_integers_are_held_as_integers(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, weights: str
) -> None:
    """Bytes in panels and of the embedding are those that the spec counts, and none is held as its values."""
    pytest.importorskip("numba", reason="numba is not installed")
    from headwater.mixers import panels
    from headwater.mixers.cpu import experts

    given, held, stacked = list[torch.Tensor | Quantised](), panels.held, experts._stacked
    monkeypatch.setattr(panels, "held", lambda weight, dtype: given.append(weight) or held(weight, dtype))
    monkeypatch.setattr(experts, "_stacked", lambda weights: given.extend(weights) or stacked(weights))
    spec = load_model(checkpoint(name), "float32", weights=weights).spec
    integers = sum(weight.shape.numel() for weight in given if isinstance(weight, Quantised))
    tables = (1 if spec.tied else 2) * spec.vocab_size * spec.hidden_size
    assert integers == sum(layer.quantised_weights for layer in spec.layers) + tables
    size = sum(weight.bytes if isinstance(weight, Quantised) else weight.nbytes for weight in given)
    assert size == pytest.approx(spec.weight_bytes, rel=0.05)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_tied"])
def test_embedding_looks_up_values_of_8_bits(checkpoint: Callable[[str], Path], name: str, weights: str) -> None:
    """With `int4`, too: 4 bits there would double the divergence of next tokens."""
    folder = checkpoint(name)
    model = load_model(folder, "float32", weights=weights).model
    stored = load_model(folder, "float32").model.embed(torch.arange(VOCAB))
    assert torch.equal(model.embed(torch.arange(VOCAB)), of(stored, 8).values())


def test_weights_kept_as_stored_are_logged(checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headwater.models"):
        load_model(checkpoint("qwen3_5"), "float32", weights="int8")
    lines = [line for line in caplog.messages if "no group of 64 divides" in line]
    spec = load_model(checkpoint("qwen3_5"), "float32").spec
    undivided = {(layer.kind, name) for layer in spec.layers for name in layer.undivided()}
    assert len(lines) == bool(undivided)
    assert all(f"{kind} {name} (" in lines[0] for kind, name in undivided)


def test_the_spec_counts_the_largest_form() -> None:
    weight = gaussian(64, 256)
    for weights, bits in quantiser.BITS.items():
        assert of(weight, bits).bytes == weight.numel() * QUANTISED_BYTES[weights]
        assert of(weight.sign(), bits).bytes < weight.numel() * QUANTISED_BYTES[weights]
