"""Scripts of `benchmarks/`, `examples/`, `stress/` and `training/`: each imports and shows its options."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "examples", "stress", "training")


def modules() -> list[str]:
    """Dotted names of all files of the folders."""
    files = [path.relative_to(ROOT) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [".".join(file.with_suffix("").parts) for file in files if file.name != "__init__.py"]


def is_script(module: str) -> bool:
    return 'if __name__ == "__main__":' in (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()


@pytest.fixture
def started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make examples find their neighbours by bare name, and keep the training script from changing malloc here."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr("training.machine.settle", lambda: None)


@pytest.mark.parametrize("module", modules())
def test_it_imports_and_shows_its_options(
    module: str, started_here: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not is_script(module):
        importlib.import_module(module)
        return
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)  # runpy warns of a module that is imported already
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out
