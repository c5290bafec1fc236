"""A plain installation replays, sizes, inspects and measures; other commands name the extra to install."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from headwater.cli.extras import GPU, OPTIONAL, PACKAGES, install_commands, remedy
from headwater.models.files import EMBEDDED_FOLDER

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
# Run command lines, from standard input, in a process without the packages of the extras.
PLAIN = """
import sys, shlex
from headwater.cli.extras import PACKAGES
MISSING = {*sum(PACKAGES.values(), ()), "starlette", "llvmlite", "transformers"}
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from headwater.cli import run
for line in sys.stdin:
    print(">", line.strip(), "->", run(shlex.split(line)), flush=True)
assert not MISSING & set(sys.modules)
"""


def plain(folder: Path, *lines: str) -> tuple[list[str], str]:
    """Run commands without the extras; return the exit code of each, and standard error."""
    command = [sys.executable, "-c", PLAIN]
    done = subprocess.run(command, input="\n".join(lines), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^> .* -> (\d)$", done.stdout, re.MULTILINE), done.stderr


def test_plain_installation_replays_sizes_inspects_and_measures(tmp_path: Path) -> None:
    replay = "replay 'rag(sessions=4)' --limit 4 --memory 1GB --jobs 1"
    lines = (
        f"{replay} --report report.html --eviction lru,marconi",
        f"{replay} --workers 2 --serve cpu",
        "size 'rag(sessions=4)' --limit 4 --jobs 1",
        f"inspect {EMBEDDED_FOLDER}",
        "inspect",
        "profiles",
        "bench --help",
        "bench serve --help",
        "serve --print-config",
    )
    codes, errors = plain(tmp_path, *lines)
    assert codes == ["0"] * len(lines), errors
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_command_without_its_extra_prints_what_to_type(tmp_path: Path) -> None:
    of_torch, of_ray = ("serve", "demo", "fidelity"), ("cluster up", "cluster status")
    codes, errors = plain(tmp_path, *of_torch, *of_ray)
    assert codes == ["2"] * 5
    expected = [
        f"headwater: {package} is not installed, type one of these:\n{pip}\n{uv}\n{GPU}\n"
        for package, extra, commands in (("torch", "serve", of_torch), ("ray", "cluster", of_ray))
        for pip, uv in [install_commands(extra)] * len(commands)
    ]
    assert errors == "".join(expected)
    assert max(map(len, errors.splitlines())) <= 80


def test_unknown_missing_package_has_no_remedy() -> None:
    assert remedy(ModuleNotFoundError(name="another")) is None
    assert remedy(ModuleNotFoundError()) is None


def test_packages_of_extras_are_those_of_the_project() -> None:
    extras = {name: {Requirement(one).name for one in PROJECT["optional-dependencies"][name]} for name in PACKAGES}
    assert {name: set(packages) for name, packages in PACKAGES.items()} == {
        name: packages - {"headwater"} for name, packages in extras.items()
    }
    assert not {Requirement(one).name for one in PROJECT["dependencies"]} & set().union(*extras.values())
    assert set(OPTIONAL) <= extras["serve"]
