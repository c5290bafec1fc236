"""The benchmarks of decoding and of layers' steps run, and have a figure for each case."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import decode, layer_steps
from headwater.models.load import read_spec
from tests import checkpoints


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, dict[str, Any]]:
    """The rows of its smallest run, by name and unit."""
    out = folder / "results.json"
    given = ["--small", "--repeats", "1", "--threads", "1", "--out", str(out), *more]
    monkeypatch.setattr(sys, "argv", [script.__name__, *given])
    script.main()
    return {f"{row['name']}, {row['unit']}": row for row in json.loads(out.read_text())["rows"]}


def test_decoding_speed_is_reported_next_to_a_plain_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoints.checkpoint(tmp_path, "qwen3_5")
    rows = run(decode, tmp_path, monkeypatch, "--model", str(model), "--streams", "1,2")
    for streams in ("1 stream", "2 streams"):
        share = rows[f"read by steps / plain read, {streams} after 128 tokens, x"]["median"]
        read = rows[f"read by steps, {streams} after 128 tokens, GB/s"]["median"]
        assert read / rows["plain read, beside contexts of 128, GB/s"]["median"] == pytest.approx(share)
        assert rows[f"decode, {streams} after 128 tokens, tokens/s"]["median"] > 0


def test_step_bytes_count_weights_and_each_streams_states_and_kv(tmp_path: Path) -> None:
    spec = read_spec(checkpoints.checkpoint(tmp_path, "qwen3_5"), "float32")
    one, two = (decode.step_bytes(spec, n, 100) for n in (1, 2))
    assert two - one == spec.checkpoint_bytes + 100 * spec.kv_bytes_per_token
    counts = spec.parameters_by_kind()
    embedding = 0 if spec.tied else counts["embedding"]
    assert decode.weight_bytes(spec, 1) == spec.weight_bytes - spec.element_bytes * (counts["norm"] + embedding)


def test_every_kind_of_layer_has_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {name: layer_steps.KINDS[name] for name in ("Gated DeltaNet", "attention", "MLP")}
    monkeypatch.setattr(layer_steps, "KINDS", kinds)
    rows = run(layer_steps, tmp_path, monkeypatch)
    for name in ("Gated DeltaNet, 1 sequence", "attention, 8 sequences after 128 tokens", "MLP, 1 sequence"):
        assert rows[f"{name}, us"]["median"] > 0


@pytest.mark.full
def test_all_kinds_have_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(layer_steps, tmp_path, monkeypatch)
    assert {row.split(", ")[0] for row in rows} == {name.split(", ")[0] for name in layer_steps.KINDS}
