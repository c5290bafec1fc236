"""`headwater models`: downloaded models are listed, completed and removed by their exact names."""

import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from headwater.cli import downloads, run
from headwater.cli.downloads import fitting_table
from headwater.hub_name import HubName
from headwater.models.files import EMBEDDED_FOLDER
from headwater.models.profiles import PROFILES
from headwater.models.published import CONTEXTS, MODELS, PROCESS_BYTES, cache_bytes, fitting, repository_of
from headwater.setting import parse_bytes
from tests.hub_mirror import mirror

NAME = "some-org/some-model"
FILES = {
    "config.json": (EMBEDDED_FOLDER / "config.json").read_bytes(),
    "tokenizer.json": b"{}",
    "model.safetensors": os.urandom(100_000),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A mirror with one model, instead of huggingface.co, and an empty cache."""
    with mirror() as found:
        found.add(NAME, FILES)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": found.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path / "own"))
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(downloads, "machine_memory", lambda: 16 * 10**9)
        yield found


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["models", *arguments]) == 0
    out = capsys.readouterr().out
    paths = (constants.HF_HUB_CACHE, str(Path(os.environ["HEADWATER_CACHE_DIR"])))
    lines = [line for line in out.splitlines() if not any(path in line for path in paths)]
    assert max(map(len, lines)) <= 80
    return out


def test_models_lists_pulls_and_removes_exactly_the_named_model(hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no model is downloaded" in printed(capsys)
    assert f"{NAME} is complete" in printed(capsys, "pull", NAME)
    folder = Path(constants.HF_HUB_CACHE) / "models--some-org--some-model"
    other = folder.with_name("models--some-org--some-model-2")
    other.mkdir()
    row = next(line for line in printed(capsys).splitlines() if NAME in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [NAME, "0.00", "complete"]
    for wrong in ("some-org/some", "Some-org/some-model", "*", "some-org/some-model/", "../cache", folder.name):
        assert run(["models", "rm", wrong]) == 2
        assert "is not downloaded" in capsys.readouterr().err
    assert folder.is_dir()
    assert f"{NAME}: 0.00 GB removed" in printed(capsys, "rm", NAME)
    assert not folder.exists()
    assert other.is_dir()


def test_partial_download_is_listed_as_such_and_pull_continues(hub, capsys: pytest.CaptureFixture[str]) -> None:
    folder = downloads.whole_folder(HubName(NAME))
    (folder / "model.safetensors").unlink()
    assert "incomplete: pull continues" in printed(capsys)
    printed(capsys, "pull", NAME)
    assert "incomplete" not in printed(capsys)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3.5-9b", "its weights are Qwen/Qwen3.5-9B"),
        ("nonsense", "not a model's name on the hub"),
        ("headwater-tiny", "not a model's name"),
    ],
)
def test_pull_of_a_name_that_is_no_repository_is_refused(
    name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["models", "pull", name]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("memory", [8 * 10**9, 25 * 10**9, 10**12])
def test_flags_of_models_that_fit_need_no_more_than_the_memory(memory: int) -> None:
    for one in MODELS:
        found, fits = fitting(one, memory)
        assert fits == (found.needed <= memory)
        flags = dict(zip(found.flags[::2], found.flags[1::2], strict=True))
        cache = parse_bytes(flags.get("--memory", "4GB"))
        assert cache >= cache_bytes(PROFILES[one.profile], CONTEXTS[0])
        assert found.needed > cache + PROCESS_BYTES
        assert fits or flags["--weights"] == "int4"
    assert fitting(MODELS[0], 10**12) == (fitting(MODELS[0], 10**13))


def test_models_that_fit_are_listed_first_with_their_flags() -> None:
    table = fitting_table(10 * 10**9)
    assert len(table.columns[0].cells) == len(MODELS)
    flags = [str(cell) for cell in table.columns[-1].cells]
    assert flags == sorted(flags, key=lambda cell: cell == "too large")
    assert "--weights int4" in flags
    assert "too large" in flags


def test_repository_of_a_profile_is_the_publishers() -> None:
    assert repository_of("qwen3.5-9b") == "Qwen/Qwen3.5-9B"
    assert repository_of("gpt-oss-20b") == "openai/gpt-oss-20b"
    assert repository_of("marconi-7b") is None
