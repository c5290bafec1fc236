"""Broken configurations, GGUF files and folders: one line of an error, at once, and no memory beyond the file."""

import json
import random
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import CheckpointError
from headwater.models import load
from headwater.models.families import read_config
from headwater.models.files import embedded
from headwater.models.gguf import config as gguf_config
from headwater.models.gguf import tensors as gguf_tensors
from headwater.models.gguf.file import GgufHeader, read_header
from headwater.models.load import load_model, read_spec
from tests.checkpoints import SMALLEST
from tests.gguf_files.convert import convert
from tests.gguf_files.writer import SIZES, pack
from tests.models.test_gguf import of_tensor

VALUES = (0, -1, 7, 2**31, 10**29, {}, [], "x", True, 0.5, 1e308, float("nan"), [-1], [[]], [7] * 3, None)
KEYS = ("mtp_layers_block_type", "rope_scaling", "quantization_config", "architectures", "layer_types", "head_dim")
SECONDS, KILOBYTES = 1.0, 200_000


def peak() -> int:
    """Return the most memory that this process has had, in kilobytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def refused_or_read(read: Callable[[], object], what: object) -> None:
    """Fail unless the call returns, or raises a CheckpointError of one line, in time."""
    begun, before, lines = time.thread_time(), peak(), [""]
    try:
        read()
    except CheckpointError as error:
        lines = str(error).splitlines()
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    assert len(lines) == 1, what
    assert time.thread_time() - begun < SECONDS, what
    assert peak() - before < KILOBYTES, what


def changed(config: dict[str, Any]) -> Iterator[tuple[object, dict[str, Any]]]:
    """Yield a configuration with each key replaced by each value, those of its text model, too."""
    inner = config.get("text_config")
    for key in {**(inner or config), **dict.fromkeys(KEYS)}:
        for value in VALUES:
            new = {**(inner or config), key: value}
            yield (key, value), {**config, "text_config": new} if inner else new


def spec_of(config: dict[str, Any]) -> None:
    spec = read_config(config, "float32")
    spec.layout(10**9)
    assert spec.weight_bytes > 0


def test_any_value_of_any_key_of_a_configuration_is_read_or_refused() -> None:
    for what, config in changed(json.loads((embedded() / "config.json").read_text())):
        refused_or_read(lambda config=config: spec_of(config), what)  # type: ignore[misc]


@pytest.mark.full
@pytest.mark.parametrize("name", SMALLEST.values())
def test_any_value_of_any_key_of_a_family_is_read_or_refused(name: str, checkpoint: Callable[[str], Path]) -> None:
    for what, config in changed(json.loads((checkpoint(name) / "config.json").read_text())):
        refused_or_read(lambda config=config: spec_of(config), what)  # type: ignore[misc]


def with_metadata(monkeypatch: pytest.MonkeyPatch, header: GgufHeader, key: str, value: Any) -> None:
    for module in (gguf_config, gguf_tensors, load):
        changed = replace(header, metadata={**header.metadata, key: value})
        monkeypatch.setattr(module, "read_header", lambda path, found=changed: found)


def test_any_value_of_gguf_metadata_is_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(pack(SIZES, of_tensor((32, 32), 8, bytes(32 * 34))))
    header = read_header(file)
    for key in SIZES:
        for value in VALUES:
            with_metadata(monkeypatch, header, key, value)
            refused_or_read(lambda: load_model(file, "float32"), (key, value))


@pytest.mark.full
@pytest.mark.parametrize("name", SMALLEST.values())
def test_any_value_of_a_familys_gguf_metadata_is_read_or_refused(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(name)
    try:
        header = read_header(convert(folder, tmp_path / "model.gguf"))
    except KeyError:
        pytest.skip("llama.cpp has no such family")
    for key in (key for key in header.metadata if not key.startswith("tokenizer.ggml.")):
        for value in VALUES:
            with_metadata(monkeypatch, header, key, value)
            refused_or_read(lambda: load_model(tmp_path / "model.gguf", "float32"), (key, value))


def test_changed_bytes_of_a_gguf_header_are_read_or_refused(tmp_path: Path) -> None:
    whole, dice = pack(SIZES, of_tensor((32, 32), 8, bytes(32 * 34))), random.Random(3)
    file = tmp_path / "model.gguf"
    for number in range(150):
        broken = bytearray(whole)
        for _ in range(dice.randrange(1, 5)):
            broken[dice.randrange(700)] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))
        file.write_bytes(broken[: dice.choice((len(broken), dice.randrange(len(broken))))])
        refused_or_read(lambda: read_spec(file), number)


def test_gguf_tensor_without_elements_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(pack(SIZES, of_tensor((0, 32), 8, b"")))
    with pytest.raises(CheckpointError, match=r"tensor 'blk.0.attn_q.weight' has shape \[0, 32\]"):
        read_spec(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("file", "key", "value", "error"),
    [
        ("config.json", "eos_token_id", {}, "key 'eos_token_id' is {}, must be the ids of tokens"),
        ("generation_config.json", "eos_token_id", ["x"], "key 'eos_token_id' is ..x"),
        ("config.json", "intermediate_size", 2**30, "describes .* weights, the files of .* bytes have fewer"),
        ("config.json", "num_attention_heads", 10**29, "'num_attention_heads' is .* must be from 1 to 65,536"),
    ],
)
def test_broken_value_of_a_folder_is_refused_with_its_key(
    file: str, key: str, value: object, error: str, tmp_path: Path
) -> None:
    for one in embedded().iterdir():
        (tmp_path / one.name).symlink_to(one)
    path = tmp_path / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    content.get("text_config", content)[key] = value
    path.write_text(json.dumps(content))
    refused_or_read(lambda: load_model(tmp_path), key)
    with pytest.raises(CheckpointError, match=error):
        load_model(tmp_path)
