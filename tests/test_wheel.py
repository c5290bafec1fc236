"""The built package, installed without a source tree, serves its page and writes a report."""

import email
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from headwater.cli.deploy import FOLDER
from tests.test_serve import PATIENCE

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "src" / "headwater" / "server" / "observe" / "page"


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that must succeed, without this process's PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copied() -> list[str]:
    """Return what the container's image is built from: the package must need nothing else."""
    return re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with this one's other packages, and with headwater only from its wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build writes into its tree
    source.mkdir()
    for name in copied():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source, cwd=folder)
    shutil.rmtree(source)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    packages = next((folder / "venv").glob("lib/python*/site-packages"))
    # Folders that a .pth names are searched, and their own .pth, which may name a source tree, are not read.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (wheel,) = folder.glob("*.whl")
    run(*pip, "install", "--no-deps", "--no-compile", "--target", packages, wheel, cwd=folder)
    return folder / "venv" / "bin" / "python"


@pytest.mark.full
def test_package_comes_from_the_wheel(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import headwater; print(headwater.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(python.parents[1])


def test_every_module_is_in_the_wheel(python: Path) -> None:
    (package,) = python.parents[1].glob("lib/python*/site-packages/headwater")
    source = ROOT / "src" / "headwater"
    found, wanted = ({path.relative_to(folder) for path in folder.rglob("*.py")} for folder in (package, source))
    assert found == wanted


def test_examples_and_files_for_operation_are_in_the_wheel(python: Path) -> None:
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    for folder, source in (("share/headwater/examples", ROOT / "examples"), ("headwater/assets/deploy", FOLDER)):
        found, wanted = ({path.name for path in of.iterdir() if path.is_file()} for of in (packages / folder, source))
        assert found == wanted


@pytest.mark.full
def test_every_file_of_the_live_page_is_served(python: Path, tmp_path: Path) -> None:
    files = [path.name for path in PAGE.iterdir() if path.suffix in (".html", ".js", ".css", ".svg")]
    assert "main.js" in files
    with serving(python, tmp_path) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        answers = {name: client.get("/" if name == "index.html" else f"/page/{name}") for name in files}
        check_health(url)
    for name, answer in answers.items():
        assert answer.status_code == 200, name
        assert answer.text == (PAGE / name).read_text(encoding="utf-8"), name


def check_health(url: str) -> None:
    """Run the health check of the container's image against a server."""
    (program,) = re.findall(r'"(import os, .*)"\]$', (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    port = url.rsplit(":", 1)[1]
    command = [sys.executable, "-c", program.replace('\\"', '"')]
    for healthy, at in ((True, port), (False, "1")):
        done = subprocess.run(command, env={**os.environ, "HEADWATER_PORT": at}, capture_output=True, text=True)
        assert (done.returncode == 0) == healthy, done.stderr


@contextmanager
def serving(python: Path, folder: Path) -> Iterator[str]:
    """The address of `headwater serve` with its embedded model, as if numba were not installed.

    Kernels of this environment's own files would be compiled again, which takes half a minute of a processor.
    """
    command = [python, "-m", "headwater", "serve", "--memory", "200MB", "--port", "0"]
    (folder / "numba.py").write_text("raise ImportError('numba is not installed')")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = []
        while not lines or not (address := re.search(r"http://127\.0\.0\.1:\d+", lines[-1])):
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        yield address[0]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.full
def test_report_of_the_lab_is_written(python: Path, tmp_path: Path) -> None:
    options = ["--limit", "4", "--memory", "1GB", "--jobs", "1", "--report", "report.html"]
    run(python, "-m", "headwater", "replay", "rag(sessions=4)", *options, cwd=tmp_path)
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert report.lstrip().lower().startswith("<!doctype html>")
    assert "<svg" in report
    assert "<script" in report


@pytest.mark.full
def test_wheel_metadata_has_licence_and_readme_with_absolute_links(python: Path) -> None:
    (folder,) = python.parents[1].glob("lib/python*/site-packages/headwater-*.dist-info")
    metadata = email.message_from_bytes((folder / "METADATA").read_bytes())
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert (folder / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    readme = str(metadata.get_payload())
    assert readme.startswith("# Headwater\n")
    targets = re.findall(r"\]\(([^)]+)\)", readme)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert re.findall(r"\bmake [a-z-]+", readme) == []


def test_with_a_repository_the_links_of_the_index_are_absolute() -> None:
    for_index = runpy.run_path(str(ROOT / "setup.py"))["for_index"]
    text = "[![a page](docs/a.png)](docs/a.md) [b](docs/b.md#c), [d](#d), [e](https://e.example), ![f](f.png)"
    assert for_index(text) == "*a page* b, d, [e](https://e.example), *f*"
    at = "https://host.example/headwater"
    assert for_index(text, at) == (
        f"![a page]({at}/raw/main/docs/a.png) [b]({at}/blob/main/docs/b.md#c), [d]({at}#d), [e](https://e.example), "
        f"![f]({at}/raw/main/f.png)"
    )
