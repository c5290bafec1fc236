"""Findings of the self-check at start-up, and the mode of products that follows from them."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from headwater.engine.proof import selfcheck
from headwater.engine.proof.selfcheck import SelfCheck, self_check, weight_shapes
from headwater.mixers import activations, softmax
from headwater.mixers.gdn import GatedDeltaNet
from headwater.mixers.linear import Linear, guarded_modes
from headwater.mixers.mla import AbsorbedHeads
from headwater.mixers.quantised import Quantised
from headwater.models.build import layer_classes
from headwater.models.families import read_config
from headwater.spec import ModelSpec, Packed

CONFIG = {
    "model_type": "qwen3_5_text", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "max_position_embeddings": 4096, "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"},
}  # fmt: skip
LATENT = {
    "model_type": "kimi_linear", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_layer_types": ["sparse"],
    "num_attention_heads": 5, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "linear_num_heads": 2, "linear_head_dim": 16, "num_experts": 6, "num_experts_per_token": 2,
    "moe_intermediate_size": 40, "routed_scaling_factor": 2.0,
}  # fmt: skip


def spec(dtype: str = "float32") -> ModelSpec:
    return read_config(CONFIG, dtype)


def latent_spec(dtype: str = "float32") -> ModelSpec:
    return read_config(LATENT, dtype)


def break_rows(monkeypatch: pytest.MonkeyPatch, modes: tuple[str, ...]) -> None:
    """Products of these modes get bits that depend on how many rows there are."""
    product = Linear.__call__

    def broken(self: Linear, x_RK: torch.Tensor, n_prefill: int) -> torch.Tensor:
        y_RN = product(self, x_RK, n_prefill)
        return y_RN * (1 + len(x_RK) % 2) if self.numerics.mode in modes else y_RN

    monkeypatch.setattr(Linear, "__call__", broken)


@pytest.fixture
def only_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out checks of kernels and of whole layers, which take most of the time."""
    for checks in ("_kernel_checks", "_chain_checks"):
        monkeypatch.setattr(selfcheck, checks, lambda *_: [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_this_machine_is_found_deterministic(dtype: str) -> None:
    check = self_check(spec(dtype))
    assert check.deterministic, check.broken_by
    assert check.mode == guarded_modes()[0]


@pytest.mark.usefixtures("only_products")
def test_tiles_are_chosen_where_kernels_products_depend_on_their_height(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rows(monkeypatch, ("compiled",))
    check = self_check(spec())
    assert (check.deterministic, check.mode) == (True, "tiled")


@pytest.mark.usefixtures("only_products")
@pytest.mark.parametrize(
    ("held", "named"),
    [
        (read_config(CONFIG, "float32", weights="int8"), "int8"),
        (read_config(CONFIG, "float32", weights="int4"), "int4"),
        (replace(read_config(CONFIG, "float32"), packed=Packed("int4", 0.5625)), "int8"),  # both are tried
        (replace(read_config(CONFIG, "float32"), packed=Packed("float8", 1.03125)), "float8"),
        (replace(read_config(CONFIG, "float32"), packed=Packed("IQ4_XS", 0.578125)), "codes of 16 integers"),
        (replace(read_config(CONFIG, "float32"), packed=Packed("nf4", 0.5625)), "codes of 16 floats"),
    ],
    ids=["int8", "int4", "a file's own", "float8", "IQ4_XS", "nf4"],
)
def test_products_with_packed_weights_are_checked_as_they_are_held(
    monkeypatch: pytest.MonkeyPatch, held: ModelSpec, named: str
) -> None:
    """Break only products with integers and float8: they are named if the model's weights are held so."""
    made, product = Linear.__init__, Linear.__call__

    def remembered(self: Linear, weight_NK: Any, *rest: Any, **options: Any) -> None:
        made(self, weight_NK, *rest, **options)
        has_table = isinstance(weight_NK, Quantised) and weight_NK.table is not None
        self.is_packed = has_table if "codes" in named else isinstance(weight_NK, Quantised)  # type: ignore[attr-defined]

    def broken(self: Linear, x_RK: torch.Tensor, n_prefill: int) -> torch.Tensor:
        y_RN = product(self, x_RK, n_prefill)
        return y_RN * (1 + len(x_RK) % 2) if self.is_packed else y_RN  # type: ignore[attr-defined]

    monkeypatch.setattr(Linear, "__init__", remembered)
    monkeypatch.setattr(Linear, "__call__", broken)
    assert self_check(spec()).deterministic
    check = self_check(held)
    assert not check.deterministic
    assert check.broken_by is not None
    assert re.match(rf"product 64 x \d+, float32 with weights in {named}, ", check.broken_by)


def test_experts_with_packed_weights_are_checked_as_they_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = pytest.importorskip("headwater.mixers.cpu.experts", reason="numba is not installed")
    float8 = pytest.importorskip("headwater.kernels.product", reason="numba is not installed").multiply_float8
    product = experts.ExpertProduct.__call__

    def broken(self: Any, x_RK: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        y_RN: torch.Tensor = product(self, x_RK, *rest, **options)
        return y_RN * (1 + (len(x_RK) == 2)) if self.held.few is float8 else y_RN  # 1 row, 2 experts

    monkeypatch.setattr(experts.ExpertProduct, "__call__", broken)
    assert self_check(latent_spec()).deterministic
    check = self_check(replace(latent_spec(), packed=Packed("float8", 1.03125)))
    assert check.broken_by == "moe with weights in float8 at 1 rows"


@pytest.mark.usefixtures("only_products")
def test_rows_that_are_looked_up_wrongly_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Linear.rows
    monkeypatch.setattr(Linear, "rows", lambda self, row_R: rows(self, row_R.flip(0)))
    check = self_check(spec())
    assert check.broken_by is not None
    assert check.broken_by.endswith(", rows looked up")


@pytest.mark.usefixtures("only_products")
def test_product_that_also_fails_in_tiles_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rows(monkeypatch, ("compiled", "tiled"))
    check = self_check(spec())
    assert not check.deterministic
    assert check.broken_by is not None
    assert check.broken_by.startswith("product 64 x")


def test_a_kernel_that_depends_on_width_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "softplus", lambda x: x * (1 + len(x) % 2))
    check = self_check(spec())
    assert (check.deterministic, check.broken_by) == (False, "softplus at 1 rows")


def test_attention_that_depends_on_its_rows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = softmax.attend
    monkeypatch.setattr(softmax, "attend", lambda q, *a, **n: attend(q, *a, **n) * (1 + (q.shape[2] == 64)))
    assert self_check(spec()).broken_by == "attention at 64 rows"


def test_decoding_that_depends_on_its_company_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = softmax.decode
    monkeypatch.setattr(softmax, "decode", lambda q, *a, **n: decode(q, *a, **n) * (1 + (len(q) == 3)))
    assert self_check(latent_spec()).broken_by == "attention at 3 decoding sequences"


def test_latent_attention_is_checked_as_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of four expanded heads with keys as wide as values, and all heads over rows of pages."""
    value = AbsorbedHeads.value
    monkeypatch.setattr(AbsorbedHeads, "value", lambda self, read: value(self, read) * (1 + (len(read) == 5)))
    assert self_check(latent_spec()).broken_by == "latent_attention at 5 decoding sequences"
    (layer,) = (layer for layer in latent_spec().layers if layer.kv_widths)
    assert selfcheck.attended(layer) == ((4, 1, 24), (1, 5, 40))


def test_a_delta_rule_that_depends_on_its_company_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    step = GatedDeltaNet.decode
    monkeypatch.setattr(
        GatedDeltaNet, "decode", lambda self, mixed, *a: step(self, mixed, *a) * (1 + (len(mixed) == 2))
    )
    assert self_check(spec()).broken_by == "gated_delta_net at 2 decoding sequences"


def test_switched_off_means_plain_products_and_no_promise() -> None:
    assert self_check(spec(), reproducible=False) == SelfCheck(False, "switched off", "plain")


def test_all_products_of_the_model_are_checked() -> None:
    # qkv, out; delta net in, out; gate and up, down; head
    assert weight_shapes(spec()) == {(64, 192), (64, 64), (64, 200), (64, 96), (96, 64), (64, 300)}


@pytest.mark.usefixtures("only_products")
def test_a_router_in_float32_is_checked_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Linear.__call__

    def broken(self: Linear, x_RK: torch.Tensor, n_prefill: int) -> torch.Tensor:
        return product(self, x_RK, n_prefill) * (1 + (x_RK.dtype == torch.float32 and len(x_RK) == 3))

    monkeypatch.setattr(Linear, "__call__", broken)
    broken_by = self_check(latent_spec("bfloat16")).broken_by
    assert broken_by is not None
    assert broken_by.startswith("product 64 x 6, float32 with weights in float32, ")
    assert broken_by.endswith(" at 3 rows of answers")


@pytest.mark.usefixtures("only_products")
def test_rows_of_prompts_are_checked_in_their_own_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Linear.__call__

    def broken(self: Linear, x_RK: torch.Tensor, n_prefill: int) -> torch.Tensor:
        return product(self, x_RK, n_prefill) * (1 + (n_prefill == 17))

    monkeypatch.setattr(Linear, "__call__", broken)
    broken_by = self_check(spec()).broken_by
    assert broken_by is not None
    assert broken_by.endswith(" at 17 rows of prompts")


@pytest.mark.usefixtures("only_products")
def test_bits_that_depend_on_threads_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    panels = pytest.importorskip("headwater.mixers.panels", reason="numba is not installed")
    if torch.get_num_threads() == 1:
        pytest.skip("there is one thread only")
    product = panels.PanelProduct.__call__

    def broken(self, x_RK, *a, **k):
        return product(self, x_RK, *a, **k) * (1 + (panels.threads_in_use() == 1))

    monkeypatch.setattr(panels.PanelProduct, "__call__", broken)
    monkeypatch.setattr(selfcheck, "guarded_modes", lambda device: ("compiled",))
    broken_by = self_check(spec()).broken_by
    assert broken_by is not None
    assert broken_by.endswith(", compiled, with 1 threads")


def test_a_norm_whose_rows_depend_on_their_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = layer_classes("cpu").stream_norm.__call__

    def broken(self: activations.StreamNorm, x_NC: torch.Tensor) -> torch.Tensor:
        return norm(self, x_NC) * (1 + len(x_NC) % 2)

    monkeypatch.setattr(layer_classes("cpu").stream_norm, "__call__", broken)
    assert self_check(spec()).broken_by == "norm of 64 channels at 1 rows"
