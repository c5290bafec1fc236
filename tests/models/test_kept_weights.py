"""Converted weights in the cache folder: equal bits at a later start, and no trust in files that are damaged."""

import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree

import pytest
import torch

from headwater.models import kept_weights, quantiser
from headwater.models.kept_weights import KeptWeights, open_kept_weights
from headwater.models.load import LoadedModel, load_model
from headwater.models.quantiser import converted
from tests.support import Bench

TOKENS = [(7 * i + 3) % 300 for i in range(70)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Path]:
    """The folder of converted weights below a cache folder of the test's own."""
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path / "cache"))
    with caplog.at_level(logging.INFO, "headwater.models"):
        yield tmp_path / "cache" / "weights"


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    return Path(copytree(checkpoint("qwen3_5"), tmp_path / "model"))


def kept(folder: Path, weights: str = "int4") -> LoadedModel:
    return load_model(folder, "float32", weights=weights, keep=True)


def logits(loaded: LoadedModel) -> torch.Tensor:
    bench = Bench(loaded.model)
    return bench.prefill(bench.sequence(len(TOKENS)), TOKENS)


def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantiser, "quantised", lambda weight_NK, bits: pytest.fail("a weight was converted"))


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3_5_tied", "qwen3_5_moe", "nemotron_h", "granite"])
def test_second_start_reads_weights_and_gives_equal_logits(
    checkpoint: Callable[[str], Path], name: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With experts, and products of which some rows stay as stored."""
    fresh = logits(load_model(checkpoint(name), "float32", weights=weights))
    assert torch.equal(logits(kept(checkpoint(name), weights)), fresh)
    no_conversion(monkeypatch)
    assert torch.equal(logits(kept(checkpoint(name), weights)), fresh)


@pytest.mark.parametrize("bits", [8, 4])
def test_read_tensors_are_those_of_a_conversion(bits: int, tmp_path: Path) -> None:
    weight_NK = torch.randn(70, 192, generator=torch.Generator().manual_seed(1))
    wanted = converted("a", lambda: weight_NK, bits)
    for _ in range(2):
        found = KeptWeights(tmp_path)("a", lambda: weight_NK, bits)
        assert (found.bits, found.table) == (wanted.bits, None)
        assert [name for name, _ in found.parts()] == [name for name, _ in wanted.parts()]
        for (_, part), (_, other) in zip(found.parts(), wanted.parts(), strict=True):
            assert part.dtype == other.dtype
            assert torch.equal(part, other)


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: data[:-1] + b"\xff", lambda _: b""]
)
def test_damaged_file_is_made_again_with_a_log_line(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    fresh = logits(kept(folder))
    file = max(cache.rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert torch.equal(logits(kept(folder)), fresh)
    assert f"the kept weight {file} is damaged and converted again" in caplog.text
    assert file.read_bytes() == content


def test_changed_checkpoint_replaces_the_earlier_weights(folder: Path, cache: Path) -> None:
    kept(folder)
    (before,) = cache.glob("*/*")
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    kept(folder)
    (after,) = cache.glob("*/*")
    assert after != before
    kept(folder, "int8")
    assert len([*cache.glob("*/*")]) == 2  # one for each format


def test_full_disk_is_a_warning_and_keeps_no_file(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls, save = [], kept_weights.save_file

    def full(tensors: dict[str, torch.Tensor], file: Path) -> None:
        calls.append(file)
        if len(calls) == 3:
            file.write_bytes(b"cut off")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, file)

    monkeypatch.setattr(kept_weights, "save_file", full)
    fresh = logits(load_model(folder, "float32", weights="int4"))
    assert torch.equal(logits(kept(folder)), fresh)
    assert len(calls) == 3
    assert "converted weights cannot be kept for later starts: [Errno 28] No space left on device" in caplog.text
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_folder_that_cannot_be_made_is_a_warning(folder: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.mkdir(mode=0o700)
    cache.write_text("")
    kept(folder)
    assert "converted weights cannot be kept for later starts: [Errno 17] File exists" in caplog.text


def test_start_logs_folder_bytes_and_counts(folder: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    for n_read, added in ((False, True), (True, False)):
        caplog.clear()
        kept(folder)
        (of_model,) = cache.glob("*/*")
        n = len([*of_model.iterdir()])
        size = sum(file.stat().st_size for file in of_model.iterdir())
        (line,) = (line for line in caplog.messages if line.startswith("converted weights in"))
        assert line.startswith(f"converted weights in {of_model}: {size / 1e3:.3g} kB; ")
        assert line.endswith(f"; {n * n_read} read, {n * added} added")


def test_keeping_needs_the_setting_and_fewer_bits(folder: Path, cache: Path) -> None:
    load_model(folder, "float32", weights="int4")
    kept(folder, "auto")
    assert not cache.exists()


def test_unfinished_files_of_ended_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".unfinished").write_bytes(b"cut off")
    KeptWeights(tmp_path)
    assert (tmp_path / ".unfinished").exists()  # a process may be writing it
    monkeypatch.setattr(kept_weights, "MAX_WRITING_SECONDS", -1.0)
    KeptWeights(tmp_path)
    assert not (tmp_path / ".unfinished").exists()


def test_other_code_has_another_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_kept_weights(folder, "int4")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "quantiser.py").write_text("BITS = 3")
    monkeypatch.setattr(kept_weights, "PACKAGE", tmp_path)
    second = open_kept_weights(folder, "int4")
    assert first is not None
    assert second is not None
    assert first.folder.parent == second.folder.parent
    assert first.folder != second.folder
