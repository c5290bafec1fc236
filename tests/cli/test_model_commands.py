"""Commands about models."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.cli import run
from headwater.lab.cost import DEVICES, StepCost, load_device
from headwater.lab.fit import Point, prefill_loads
from headwater.models.profiles import PROFILES


def test_profiles_lists_every_model_with_its_sizes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert run(["profiles"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in PROFILES)
    line = next(line for line in told.splitlines() if "qwen3.5-9b" in line)
    assert [cell.strip() for cell in line.split("│")[3:8]] == ["8", "24", "32,768", "51,511,296", "1,572"]


def test_profiles_tells_the_formats_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profiles", "qwen3-next-80b-a3b", "qwen3-next-80b-a3b-fp8"]) == 0
    lines = [line.replace(" ", "") for line in capsys.readouterr().out.splitlines()]
    for name, held in (("qwen3-next-80b-a3b", "bfloat16"), ("qwen3-next-80b-a3b-fp8", "float8")):
        assert any(line.startswith(f"│{name}│") and line.endswith(f"│bfloat16│{held}│") for line in lines)


def test_profiles_shows_one_in_detail(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profiles", "kimi-linear-48b-a3b"]) == 0
    told = capsys.readouterr().out
    assert "latent_attention" in told
    assert "marconi-7b" not in told


def test_profiles_prints_the_source_of_each_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profiles", "--sources", "marconi-7b"]) == 0
    assert "2411.19379" in capsys.readouterr().out


def test_unknown_profile_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profiles", "qwen9"]) == 2
    assert "'qwen9' is neither a folder with a config.json" in capsys.readouterr().err


def test_fit_writes_a_device_that_predicts_its_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = StepCost(PROFILES["qwen3.5-9b"], DEVICES["l4"])
    measured = []
    for n in range(40, 9000, 800):
        seconds = sum(map(cost.seconds, prefill_loads(Point(n, n // 3, 1.0), 1024)))
        measured.append({"prompt_tokens": n, "cached_tokens": n // 3, "ttft_ms": 1000 * seconds})
    (tmp_path / "points.json").write_text(json.dumps(measured))
    out = tmp_path / "mine.toml"
    arguments = [str(tmp_path / "points.json"), "--model", "qwen3.5-9b", "--device", "l4", "--out", str(out)]
    assert run(["fit", *arguments]) == 0
    assert "R² 1.0000" in capsys.readouterr().out
    fitted = load_device(str(out))
    assert fitted.compute_efficiency == pytest.approx(DEVICES["l4"].compute_efficiency, rel=1e-3)
    assert fitted.name == "mine"
    assert "12 requests of qwen3.5-9b" in fitted.source


@pytest.mark.parametrize("width", ["80", None])
def test_piped_table_is_as_wide_as_columns_or_80(
    width: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", width)
    for arguments in (["profiles"], ["profiles", "--sources"], ["inspect"]):
        assert run(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        assert not any("…" in line for line in lines)


def test_help_of_profiles_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profiles", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in PROFILES)


def test_fidelity_reports_each_mode_and_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    ways = ("--way", "naive", "--way", "fast")
    assert run(["fidelity", "--cut", "300", "--parts", "3", *ways, "--threads", "2", "--json", str(file)]) == 0
    told = capsys.readouterr().out
    assert all(title in told for title in ("composed against whole", "states after", "keys and values", "ends of 8"))
    found = json.loads(file.read_text())
    fast, naive = (found["ways"][way]["mean"] for way in ("fast", "naive"))
    assert fast["states"]["0"]["error"] <= 1e-5 < naive["states"]["0"]["error"]
    assert fast["anew"] == pytest.approx((100 + 32 + 1) / 301)
    assert found["ways"]["fast"]["prompts"][0]["anew"] == 133
    assert found["attention"]


@pytest.mark.parametrize("skipping", [(), ("--skip-attention",)])
def test_fidelity_of_a_window_model_reports_keys_and_values(
    skipping: tuple[str, ...], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Layers of full attention and layers with a window report them; without attention no layer does."""
    file = tmp_path / "found.json"
    options = ("--cut", "300", "--parts", "3", "--way", "fast", "--threads", "2", "--json", str(file), *skipping)
    assert run(["fidelity", str(checkpoint("qwen3_window")), *options]) == 0
    kept = json.loads(file.read_text())["ways"]["fast"]["mean"]["kept"]
    assert [*kept] == ([] if skipping else ["0", "2"])
    assert all(set(of_layer) == {"keys", "values"} for of_layer in kept.values())
    assert all(
        distance["error"] <= 1e-5 for layer, names in kept.items() for distance in names.values() if layer == "0"
    )
