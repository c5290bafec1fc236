"""Loading of model folders: what can be wrong with one, and which of its files decide what."""

import json
import shutil
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.config import ServeConfig
from headwater.errors import CheckpointError
from headwater.models.dtype import choose_dtype
from headwater.models.families import read_folder
from headwater.models.files import embedded
from headwater.models.gguf.tensors import GgufTensors
from headwater.models.load import load_model, read_spec
from headwater.models.tensors import CheckpointTensors, ModelTensors
from headwater.setting import SettingError
from tests.covering import cells
from tests.gguf_files.convert import convert
from tests.processors import AMX, AVX2, AVX512, AVX512_BF16, pretend
from tests.support import Bench

TOKENS = list(range(300, 400))


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a checkpoint, to be spoiled."""
    return lambda name: Path(shutil.copytree(checkpoint(name), tmp_path / name))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits(folder: Path) -> torch.Tensor:
    loaded = load_model(folder, "float32")
    bench = Bench(loaded.model)
    return bench.prefill(bench.sequence(len(TOKENS)), TOKENS)


def test_an_unknown_architecture_is_named(folder: Callable[[str], Path]) -> None:
    path = folder("qwen3_5")
    edit(path / "config.json", model_type="llama")
    with pytest.raises(CheckpointError, match=r"config.json: model_type 'llama' is not one of .*qwen3_next"):
        load_model(path)


def test_a_missing_tensor_is_named(folder: Callable[[str], Path]) -> None:
    path = folder("qwen3_5")
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor '{name}' is missing"):
        load_model(path)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Callable[[str], Path]) -> None:
    path = folder("qwen3_5")
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(path, lambda tensors: tensors.update({name: torch.zeros(64, 100)}))
    with pytest.raises(CheckpointError, match=rf"model.safetensors: tensor '{name}' .*\[64, 100\].*\[64, 160\]"):
        load_model(path)


def test_a_truncated_file_is_named(folder: Callable[[str], Path]) -> None:
    path = folder("qwen3_5")
    file = path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    numbers = f"{len(whole) - 1000:,} of {len(whole):,} bytes"
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .* truncated, with {numbers}: .*`hf download"):
        load_model(path)
    file.write_bytes(whole[:100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .* its 100 bytes are not a whole safetensors file"):
        load_model(path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n", "pointer of Git LFS.*git lfs pull"),
        (b"GGUF" + bytes(28) + b"general.architecture" + b"\x08\0\0\0" + b"\5" + bytes(7) + b"llama", "'llama'"),
        (b"GGUF", "it is a GGUF file, a format"),
        (b"PK\x03\x04archive/data.pkl", "pickled file of PyTorch"),
        (b"\x80\x02}q\x00.", "pickled file of PyTorch"),
        (b"", "its 0 bytes are not a whole safetensors file"),
    ],
)
def test_file_of_another_format_is_named_with_advice(folder: Callable[[str], Path], content: bytes, what: str) -> None:
    path = folder("qwen3_5")
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{what}"):
        load_model(path)
    with pytest.raises(SettingError, match=rf"not a folder with a config\.json: .*{what}"):
        ServeConfig(model=path / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model-q4.gguf", "model-q4.gguf is a GGUF file: name that file, not its folder$"),
        ("pytorch_model.bin", "is a pickled file.*: only safetensors are read; download it with"),
    ],
)
def test_weights_of_another_format_in_a_folder_are_named(
    folder: Callable[[str], Path], name: str, what: str, tmp_path: Path
) -> None:
    path = folder("qwen3_5")
    (path / "model.safetensors").rename(path / name)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: no such file; .*{what}"):
        load_model(path)
    (path / "config.json").unlink()
    with pytest.raises(SettingError, match=what):
        ServeConfig(model=path)


def test_error_for_a_hub_name_states_the_download_command() -> None:
    with pytest.raises(SettingError, match="`hf download some-org/some-model --local-dir some-model` and serve that"):
        ServeConfig(model=Path("some-org/some-model"))


def test_a_missing_shard_is_named(folder: Callable[[str], Path]) -> None:
    path = folder("qwen3_5_sharded")
    shard = sorted(path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}: no such file"):
        load_model(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_bad_json_is_named(name: str, folder: Callable[[str], Path]) -> None:
    path = folder("qwen3_5")
    (path / name).write_text('{"a": ')
    with pytest.raises(CheckpointError, match=name):
        load_model(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, folder: Callable[[str], Path]) -> None:
    path = folder("qwen3_5")
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: no such file"):
        load_model(path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere/config\.json: no such file"):
        load_model(tmp_path / "nowhere")


def test_all_end_tokens_are_found(folder: Callable[[str], Path]) -> None:
    path = folder("qwen3_5")
    edit(path / "config.json", eos_token_id=5)
    edit(path / "generation_config.json", eos_token_id=[6, 7])
    loaded = load_model(path)
    named = loaded.tokenizer.token_to_id("<|im_end|>")
    assert loaded.eos_token_ids == (6, 7, 5, named)
    assert loaded.special_tokens["eos_token"] == "<|im_end|>"
    assert loaded.generation["eos_token_id"] == [6, 7]


def test_the_chat_template_comes_from_its_file_or_from_the_tokenizers_config(folder: Callable[[str], Path]) -> None:
    path = folder("qwen3_5")
    assert load_model(path).chat_template is None
    several = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    edit(path / "tokenizer_config.json", chat_template=several)
    assert load_model(path).chat_template == "d"
    edit(path / "tokenizer_config.json", chat_template="one")
    assert load_model(path).chat_template == "one"
    (path / "chat_template.jinja").write_text("file")
    assert load_model(path).chat_template == "file"


def test_text_model_of_a_multimodal_checkpoint_is_loaded_and_the_rest_logged(
    folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headwater.models")
    path = folder("qwen3_5")
    expected = logits(path)
    assert not caplog.records
    config = json.loads((path / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    (path / "config.json").write_text(json.dumps(outer | {"vision_config": {"depth": 2}}))

    def nest(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.patch_embed.weight"] = torch.zeros(3)
        tensors["model.visual.patch_embed.bias"] = torch.zeros(3)
        tensors["talker.norm.weight"] = torch.zeros(3)
        tensors["mtp.norm.weight"] = torch.zeros(3)  # of a head, which `--speculation mtp` reads

    rewrite(path, nest)
    assert torch.equal(logits(path), expected)
    skipped = "skipped 3 tensors that the text model does not compute with: model.visual (2), talker.norm (1)"
    assert [record.getMessage() for record in caplog.records] == [f"{path}: {skipped}"]


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_experts_may_be_fused_or_one_by_one(name: str, folder: Callable[[str], Path]) -> None:
    path = folder(name)
    expected = logits(path)
    single = any(".experts.0." in tensor for tensor in load_file(path / "model.safetensors"))
    rewrite(path, fuse_experts if single else split_experts)
    assert any(".experts.0." in tensor for tensor in load_file(path / "model.safetensors")) != single
    assert torch.equal(logits(path), expected)


def fuse_experts(tensors: dict[str, torch.Tensor]) -> None:
    prefixes = {name.split("experts.")[0] + "experts." for name in tensors if ".experts.0." in name}
    for prefix in prefixes:
        gates, ups, downs = (
            [tensors.pop(f"{prefix}{e}.{part}.weight") for e in range(8)]
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[prefix + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
        tensors[prefix + "down_proj"] = torch.stack(downs)


def split_experts(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        prefix = name.removesuffix("gate_up_proj")
        gate_up, down = tensors.pop(name), tensors.pop(prefix + "down_proj")
        for e in range(len(down)):
            gate, up = gate_up[e].chunk(2)
            for part, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[e])):
                tensors[f"{prefix}{e}.{part}.weight"] = weight.clone()


@pytest.mark.parametrize(
    ("cpu", "stored", "wanted", "why"),
    [
        (AVX2, "bfloat16", "float32", "no bfloat16 products"),
        (AVX512, "bfloat16", "float32", "no bfloat16 products"),
        (AVX512_BF16, "bfloat16", "bfloat16", "natively: avx512_bf16"),
        (AMX, "bfloat16", "bfloat16", "natively: avx512_bf16, amx_bf16"),
        (AMX, "float32", "float32", "stored in it"),
    ],
)
def test_auto_dtype_is_bfloat16_if_native_and_weights_are_not_float32(monkeypatch, cpu, stored, wanted, why):
    pretend(monkeypatch, cpu)
    chosen = choose_dtype({"dtype": stored})
    assert chosen.name == wanted
    assert why in chosen.reason
    assert choose_dtype({"dtype": stored}, "bfloat16").reason == "--dtype bfloat16"


def test_auto_keeps_weights_that_are_stored_in_float32(checkpoint: Callable[[str], Path]) -> None:
    assert load_model(checkpoint("qwen3_5")).spec.dtype_name == "float32"
    chosen = choose_dtype({"dtype": "bfloat16"}).name
    assert chosen in ("float32", "bfloat16")
    assert load_model(checkpoint("qwen3_5_bfloat16")).spec.dtype_name == chosen


def test_sharded_and_single_files_give_the_same_model(
    checkpoint: Callable[[str], Path], folder: Callable[[str], Path]
) -> None:
    path = folder("qwen3_5_sharded")
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 1
    merged = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    for shard in shards:
        shard.unlink()
    save_file(merged, path / "model.safetensors")  # the index is stale now
    assert torch.equal(logits(path), logits(checkpoint("qwen3_5_sharded")))
    (path / "model.safetensors.index.json").unlink()
    assert torch.equal(logits(path), logits(checkpoint("qwen3_5_sharded")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_5_tied"])
def test_a_loaded_model_keeps_no_file_mapped(name: str, dtype: str, checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint(name)
    loaded = load_model(path, dtype)
    assert loaded.model.blocks
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{path}/" in line]


def resident_of(path: Path) -> int:
    """Resident bytes of the mappings of files in a folder, or of one file."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        inside = str(path) in line if not first.endswith(":") else inside
        total += 1024 * int(rest[0]) if inside and first == "Rss:" else 0
    return total


MAPPED = product(("qwen3_5", "qwen3_5_sharded", "qwen3_5_tied", "qwen3_5_moe", "gguf"), ("auto", "int8"))


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are read from /proc")
@pytest.mark.parametrize(("name", "weights"), cells(MAPPED, lambda *cell: ("int8" in cell) == ("qwen3_5" in cell)))
def test_pages_of_a_file_leave_the_process_after_each_layer(
    name: str, weights: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("qwen3_5" if name == "gguf" else name)
    if name == "gguf":
        convert(path, path := tmp_path / "model.gguf", "BF16")
    kind = GgufTensors if name == "gguf" else CheckpointTensors
    unmap, resident = kind.unmap, []

    def recorded(self: ModelTensors) -> None:
        before = resident_of(path)
        unmap(self)
        resident.append((before, resident_of(path)))

    monkeypatch.setattr(kind, "unmap", recorded)
    loaded = load_model(path, "float32", weights=weights)
    assert len(resident) == 1 + (not loaded.spec.tied) + len(loaded.spec.blocks)
    assert all(before > 0 for before, _ in resident), "the control: they were resident"
    assert not any(after for _, after in resident)


BROKEN_CONFIGS = (
    {"text_config": 5},
    {"rope_parameters": [1]},
    {"model_type": ["qwen3_5_text"]},
    {"num_hidden_layers": 2**31},
    {"layer_types": [[]] * 4},
    {"rms_norm_eps": float("nan")},
    {"rope_parameters": {"partial_rotary_factor": float("inf")}},
)


@pytest.mark.parametrize("broken", BROKEN_CONFIGS, ids=str)
def test_config_value_of_another_kind_is_refused_by_its_key(tmp_path, broken):
    config = json.loads((embedded() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | broken))
    with pytest.raises(CheckpointError, match=r"text_config|rope|model_type|layer|rms_norm_eps|rotary"):
        read_spec(tmp_path)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}", b"\xff{}", b"[]"])
def test_config_that_is_not_json_is_refused(tmp_path, raw):
    (tmp_path / "config.json").write_bytes(raw)
    for read in (read_spec, read_folder):
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read(tmp_path)


def test_output_of_delta_layers_of_ling_is_read_by_its_published_name(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers writes `dense`, where inclusionAI, SGLang and mlx-lm have `o_proj`."""
    folder = Path(shutil.copytree(checkpoint("ling"), tmp_path / "ling"))
    tensors = load_file(folder / "model.safetensors")
    delta = [name.removesuffix("A_log") for name in tensors if name.endswith("A_log")]
    published = {f"{at}dense.weight": f"{at}o_proj.weight" for at in delta}
    save_file({published.get(name, name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert published.keys() <= tensors.keys()
    load_model(folder)
