"""Models in GGUF files: the logits and greedy tokens of the Hugging Face checkpoint, family by family."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headwater.config import ServeConfig
from headwater.errors import CheckpointError
from headwater.hub_name import name_of
from headwater.models.digest import weights_digest
from headwater.models.families import read_folder
from headwater.models.gguf.config import CONFIGS
from headwater.models.gguf.names import NAMINGS
from headwater.models.load import LoadedModel, load_model, open_weights, read_spec
from headwater.models.profiles import load_profile
from headwater.setting import SettingError
from tests.checkpoints.mtp import add_head
from tests.gguf_files.blocks import RANDOM_FORMATS
from tests.gguf_files.convert import FAMILIES, convert
from tests.gguf_files.values import as_float32, in_parts
from tests.support import Bench

TOKENS = list(range(300, 400))
EXACT = (
    "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_tied", "qwen3_5_moe", "qwen3_next", "qwen3_next_odd_heads",
    "granite", "granite_moe", "granite_rope", "falcon_h1", "nemotron_h", "mamba2", "mamba", "jamba", "jamba_moe",
    "lfm2", "lfm2_moe", "kimi_linear_equal_heads", "gpt_oss",
    "gpt_oss_whole_ramp",
)  # fmt: skip
FOLDED = ("falcon_h1",)  # converters multiply weights by factors: other roundings, and other layers
FORMS = ("BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def greedy(loaded: LoadedModel, n: int = 20) -> tuple[torch.Tensor, list[int]]:
    """The logits after a prompt, and the tokens that are chosen from there on."""
    bench = Bench(loaded.model)
    sequence = bench.sequence(len(TOKENS) + n)
    first = logits = bench.prefill(sequence, TOKENS)
    chosen = []
    for _ in range(n):
        chosen.append(int(logits.view(-1, logits.shape[-1])[-1].argmax()))
        logits = bench.step([], [(sequence, chosen[-1])])
    return first, chosen


def test_every_architecture_has_its_config_its_names_and_a_test() -> None:
    assert CONFIGS.keys() == NAMINGS.keys()
    assert CONFIGS.keys() - {"nemotron_h"} == {architecture for architecture, *_ in FAMILIES.values()}


@pytest.mark.parametrize("name", EXACT)
def test_a_file_in_float32_has_the_logits_of_its_checkpoint(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoint(name)
    file = convert(folder, tmp_path / f"{name}.gguf")
    expected, found = load_model(folder, "float32"), load_model(file, "float32")
    if not name.startswith(("qwen3_next", *FOLDED)):  # whose projections are split
        assert found.spec.layers == expected.spec.layers
    (expected_V, tokens), (found_V, ours) = greedy(expected), greedy(found)
    torch.testing.assert_close(found_V, expected_V, rtol=0, atol=1e-3 if name in FOLDED else 1e-4)
    assert ours == tokens
    assert found.eos_token_ids == expected.eos_token_ids
    assert found.name == name
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in maps if str(file) in line]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_mtp_head_of_a_file_is_that_of_its_checkpoint(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(checkpoint(name), tmp_path / name))
    add_head(folder)
    file = convert(folder, tmp_path / "model.gguf")
    stored, found = load_file(folder / "model.safetensors"), open_weights(file, "float32")
    names = [name for name in stored if name.startswith("mtp.") and ".experts." not in name]
    assert len(names) > 10
    for one in names:
        torch.testing.assert_close(found.raw(one, *stored[one].shape), stored[one], rtol=0, atol=1e-6)
    assert load_model(file, "float32", mtp=True).mtp is not None
    with caplog.at_level("INFO", "headwater.models"):
        assert load_model(file, "float32").mtp is None
    assert "skipped" in caplog.text
    assert greedy(load_model(file, "float32"), 5)[1] == greedy(load_model(folder, "float32"), 5)[1]


@pytest.mark.usefixtures("exact_rows")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear_equal_heads"])
def test_a_quantised_file_has_the_logits_of_its_values(
    name: str, form: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """A file in float32 with the values of the quantised one has the same logits."""
    same_values(checkpoint(name), tmp_path, form)


@pytest.mark.usefixtures("exact_rows")
@pytest.mark.parametrize("form", ["Q4_K", "Q5_K", "Q6_K", *RANDOM_FORMATS])
def test_a_file_of_k_formats_has_the_logits_of_its_values(
    form: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    same_values(checkpoint("qwen3_5_blocks"), tmp_path, form)


@pytest.mark.usefixtures("exact_rows")
def test_a_file_of_mixed_formats_has_the_logits_of_its_values(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    forms = {"attn_v.weight": "Q6_K", "attn_qkv.weight": "Q5_K", "ffn_down.weight": "Q6_K", "token_embd.weight": "Q8_0"}
    same_values(checkpoint("qwen3_5_blocks"), tmp_path, "Q4_K", forms)


@pytest.mark.parametrize(("form", "bits"), [("Q4_0", 4.5), ("Q8_0", 8.5), ("Q4_K", 4.75)])
def test_bytes_of_weights_are_counted_by_the_types_of_tensors(
    form: str, bits: float, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoint("qwen3_5_blocks")
    plain = read_folder(convert(folder, tmp_path / "plain.gguf", "BF16"), "bfloat16")
    file = convert(folder, tmp_path / "quantised.gguf", form)
    spec = read_folder(file, "bfloat16")
    assert (plain.packed, plain.weights_held, spec.weights_held) == (None, plain.weight_dtype, form)
    kinds, products = spec.parameters_by_kind(), sum(layer.quantised_weights for layer in spec.layers)
    table = kinds["embedding"] + kinds["head"]
    counted = plain.weight_bytes - (products + table) * (plain.weight_element_bytes - bits / 8)
    assert spec.weight_bytes == pytest.approx(counted, rel=1e-4)
    assert load_profile(str(file)).weight_bytes == spec.weight_bytes
    fewer = read_folder(file, "bfloat16", weights="int4")
    assert fewer.weights_held == "int4"
    assert fewer.table_element_bytes == bits / 8


def test_a_type_counts_by_its_share_of_the_weights(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    forms = {"ffn_down.weight": "Q6_K", "token_embd.weight": "F16", "output.weight": "F16"}
    spec = read_folder(convert(checkpoint("qwen3_5_blocks"), tmp_path / "mixed.gguf", "Q4_K", forms))
    assert spec.packed is not None
    assert (spec.packed.name, spec.packed.table_bytes) == ("Q4_K", None)
    assert 4.75 < 8 * spec.packed.element_bytes < 9.125


def same_values(folder: Path, tmp_path: Path, form: str, forms: dict[str, str] | None = None) -> None:
    file = convert(folder, tmp_path / "quantised.gguf", form, forms)
    plain = as_float32(file, tmp_path / "plain.gguf")
    (expected_V, tokens), (found_V, ours) = (greedy(load_model(one, "float32"), 5) for one in (plain, file))
    torch.testing.assert_close(found_V, expected_V, rtol=0, atol=1e-4)
    assert ours == tokens


def test_file_is_accepted_like_a_folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("qwen3_5_bfloat16")
    file = convert(folder, tmp_path / "small.gguf", "BF16")
    assert ServeConfig(model=file).model == file
    assert read_spec(file).dtype_name == read_spec(folder).dtype_name
    assert read_folder(file).layers == read_folder(folder).layers
    assert name_of(file) == "small"
    assert load_profile(str(file)).name == "small"
    with pytest.raises(SettingError, match="not a folder with a config"):
        ServeConfig(model=tmp_path / "other.gguf")
    with pytest.raises(SettingError, match=r"small\.gguf is a GGUF file: name that file, not its folder"):
        ServeConfig(model=tmp_path)


def test_file_in_parts_is_served_by_the_name_of_any(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    file = convert(checkpoint("qwen3_5_blocks"), tmp_path / "model.gguf", "Q4_K")
    first, second, third = in_parts(file, 3)
    expected_V, tokens = greedy(load_model(file, "float32"), 3)
    for part in (first, third):
        loaded = load_model(part, "float32")
        found_V, ours = greedy(loaded, 3)
        assert torch.equal(found_V, expected_V)
        assert (ours, loaded.name) == (tokens, "model")
    assert read_spec(first).weight_bytes == read_spec(file).weight_bytes
    assert weights_digest(first) == weights_digest(second) != weights_digest(file)
    second.rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf is missing, one of 3 parts"):
        read_spec(first)
    third.rename(second)
    third.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"it is part 3 of 3 by its metadata: keep the names of parts"):
        read_spec(first)
