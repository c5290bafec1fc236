"""A layer's tensors, however its family's checkpoints hold them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headwater.errors import CheckpointError
from headwater.layers.attention import GroupedAttention
from headwater.layers.feed_forward import Experts, Mlp
from headwater.layers.layer import Layer
from headwater.models.tensors import CheckpointTensors, PartTensors

MLP = Mlp(8, 12)
ATTENTION = GroupedAttention(8, heads=4, kv_heads=1, head_dim=4, bias=True)
EXPERTS = Experts(8, experts=3, per_token=2, intermediate=5, shared=7, scores="sigmoid", corrected=True)
Tensors = dict[str, torch.Tensor]
Names = tuple[tuple[str, str], ...]


def random(shape: Layer) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator) for name, size in shape.tensors().items()}


def joined(ours: Tensors, first: str, dim: int) -> torch.Tensor:
    return torch.cat([ours[f"{first}{name}_proj.weight"] for name in ("gate", "up")], dim)


def one_by_one(ours: Tensors, gate: str, up: str, down: str) -> Tensors:
    kinds = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return {
        f"experts.{e}.{theirs}.weight": ours[f"experts.{kind}.weight"][e]
        for kind, theirs in kinds.items()
        for e in range(3)
    }


def shared(ours: Tensors, name: str) -> Tensors:
    rest = {n: t for n, t in ours.items() if not n.startswith(("experts.", "correction"))}
    rest = {n.replace("shared_expert.", f"{name}."): t for n, t in rest.items()}
    return rest | {"gate.e_score_correction_bias": ours["correction"]}


CORRECTED = (("correction", "gate.e_score_correction_bias"),)
GRANITE: Names = (
    ("gate", "router.layer"),
    ("experts.gate_up_proj", "input_linear.weight"),
    ("experts.down_proj", "output_linear.weight"),
    ("shared_expert.gate_up_proj", "shared_mlp.input_linear"),
    ("shared_expert.down_proj", "shared_mlp.output_linear"),
)
MIXTRAL: Names = (("expert.gate_proj", "w1"), ("expert.up_proj", "w3"), ("expert.down_proj", "w2"))
FORMS: dict[str, tuple[Names, Callable[[Tensors], Tensors]]] = {
    "deepseek": (
        (("shared_expert", "shared_experts"),),
        lambda ours: shared(ours, "shared_experts") | one_by_one(ours, "gate_proj", "up_proj", "down_proj"),
    ),
    "mixtral": (MIXTRAL, lambda ours: shared(ours, "shared_expert") | one_by_one(ours, "w1", "w3", "w2")),
    "stacked": (
        (),
        lambda ours: (
            shared(ours, "shared_expert")
            | {
                "experts.gate_up_proj": joined(ours, "experts.", 1),
                "experts.down_proj": ours["experts.down_proj.weight"],
            }
        ),
    ),
    "granite": (
        GRANITE,
        lambda ours: {
            "router.layer.weight": ours["gate.weight"],
            "gate.e_score_correction_bias": ours["correction"],
            "input_linear.weight": joined(ours, "experts.", 1),
            "output_linear.weight": ours["experts.down_proj.weight"],
            "shared_mlp.input_linear.weight": joined(ours, "shared_expert.", 0),
            "shared_mlp.output_linear.weight": ours["shared_expert.down_proj.weight"],
        },
    ),
}


def read(folder: Path, tensors: Tensors, shape: Layer, names: Names) -> PartTensors:
    save_file({f"here.{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    opened = CheckpointTensors(folder, torch.float32, torch.device("cpu"))
    return PartTensors(opened, "here.", shape.tensors(), names)


@pytest.mark.parametrize("form", FORMS)
def test_experts_are_found_in_every_form(form: str, tmp_path: Path) -> None:
    names, store = FORMS[form]
    ours = random(EXPERTS)
    found = read(tmp_path, store(ours), EXPERTS, names + CORRECTED)
    assert list(found) == list(ours)
    for name, tensor in ours.items():
        assert torch.equal(found[name], tensor), name


def test_gate_and_up_may_be_one_tensor(tmp_path: Path) -> None:
    ours = random(MLP)
    stored = {"input_linear.weight": joined(ours, "", 0), "output_linear.weight": ours["down_proj.weight"]}
    found = read(tmp_path, stored, MLP, (("gate_up_proj", "input_linear"), ("down_proj", "output_linear")))
    assert all(torch.equal(found[name], tensor) for name, tensor in ours.items())


def test_queries_keys_and_values_may_be_one_tensor(tmp_path: Path) -> None:
    ours = random(ATTENTION)
    stored = {
        f"query_key_value.{of}": torch.cat([ours[f"{part}_proj.{of}"] for part in "qkv"]) for of in ("weight", "bias")
    } | {"dense.weight": ours["o_proj.weight"]}
    found = read(tmp_path, stored, ATTENTION, (("qkv_proj", "query_key_value"), ("o_proj", "dense")))
    assert all(torch.equal(found[name], tensor) for name, tensor in ours.items())
    with pytest.raises(CheckpointError, match=r"shape \[16, 8\], the config asks for \[24, 8\]"):
        read(tmp_path, {"qkv_proj.weight": torch.zeros(16, 8)}, ATTENTION, ())["k_proj.weight"]


@pytest.mark.parametrize(
    ("shape", "wanted", "missing"),
    [(MLP, "up_proj.weight", "here.up_proj.weight"), (EXPERTS, "experts.up_proj.weight", "here.experts.up_proj")],
)
def test_missing_tensor_is_named(shape: Layer, wanted: str, missing: str, tmp_path: Path) -> None:
    found = read(tmp_path, {"other": torch.zeros(1)}, shape, ())
    with pytest.raises(CheckpointError, match=f"tensor '{missing}' is missing"):
        found[wanted]


def test_half_of_a_tensor_has_its_shape_checked(tmp_path: Path) -> None:
    found = read(tmp_path, {"gate_up_proj.weight": torch.zeros(12, 8)}, MLP, ())
    with pytest.raises(CheckpointError, match=r"shape \[12, 8\], the config asks for \[24, 8\]"):
        found["gate_proj.weight"]


def test_existing_one_of_several_names_is_read(tmp_path: Path) -> None:
    ours = random(MLP)
    names = tuple((name, f"{at}.{name}") for name in ("gate_proj", "up_proj", "down_proj") for at in ("mlp", "moe"))
    for at in ("mlp", "moe"):
        found = read(tmp_path, {f"{at}.{name}": tensor for name, tensor in ours.items()}, MLP, names)
        assert all(torch.equal(found[name], tensor) for name, tensor in ours.items())
    found = read(tmp_path, {"other": torch.zeros(1)}, MLP, names)
    with pytest.raises(CheckpointError, match=r"tensor 'here.mlp.up_proj.weight' is missing"):
        found["up_proj.weight"]


def test_dimensions_of_one_are_not_looked_at(tmp_path: Path) -> None:
    ours = random(MLP)
    found = read(tmp_path, ours | {"up_proj.weight": ours["up_proj.weight"][None, :, None]}, MLP, ())
    assert torch.equal(found["up_proj.weight"], ours["up_proj.weight"])
