"""`make demo` takes torch's build for CPUs wherever it is, and the usual one where it is nowhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCH = re.search(r"^TORCH := (.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# A venv whose pip and python write down what they are called with; no index has a build for CPUs if NO_CPU is set.
PIP = """#!/bin/sh
echo "pip $@" >> "$CALLS"
case "$*" in *+cpu*) if [ -n "$NO_CPU" ]; then echo "ERROR: No matching distribution" >&2; exit 1; fi;; esac
"""
PYTHON = """#!/bin/sh
echo "python $@ device=$HEADWATER_DEVICE" >> "$CALLS"
"""
MAKES_VENV = f"""#!/bin/sh
if [ "$1" != -m ]; then exec {sys.executable} "$@"; fi
mkdir -p "$3/bin" && cp "$STUBS/pip" "$STUBS/python" "$3/bin/"
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


def own_environment() -> dict[str, str]:
    """The environment without what a make that runs these tests has told them."""
    return {key: value for key, value in os.environ.items() if key not in ("GPU", "MAKEFLAGS", "MAKELEVEL")}


@pytest.fixture
def make(tmp_path: Path):
    """Run `make demo` with a venv of stubs; return what they were called with since the last time."""
    for name, script in (("pip", PIP), ("python", PYTHON), ("python3", MAKES_VENV)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"

    def run(python: str = str(tmp_path / "python3"), **environment: str) -> tuple[list[str], str]:
        calls.write_text("")
        kept = own_environment() | {"CALLS": str(calls), "STUBS": str(tmp_path), "NO_CPU": "", **environment}
        command = ["make", "demo", f"VENV={tmp_path}/venv", f"PYTHON={python}"]
        done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=60)
        return calls.read_text().splitlines(), done.stdout + done.stderr

    return run


def torches(calls: list[str]) -> list[str]:
    return [call for call in calls if "torch" in call]


def test_build_for_cpus_is_asked_for_first_with_short_timeouts(make):
    calls, _ = make()
    (asked,) = torches(calls)
    assert asked.endswith(f"--extra-index-url {CPU_INDEX} {TORCH}+cpu")
    seconds, retries = (int(re.search(rf"--{name} (\d+)", asked)[1]) for name in ("timeout", "retries"))
    assert seconds * (retries + 1) <= 30
    assert calls[-1] == "python -m headwater demo device="


def test_missing_cpu_build_installs_the_default_one_and_reports_it(make):
    calls, printed = make(NO_CPU="1")
    assert torches(calls)[1:] == [f"pip install --quiet {TORCH}"]
    assert "ERROR: No matching distribution\nNo build for CPUs can be had, so the usual one is taken." in printed
    assert calls[-1].startswith("python -m headwater demo")


def test_pip_shows_its_bars_on_a_terminal_only():
    leader, terminal = os.openpty()
    for errors, quiet in ((terminal, False), (subprocess.PIPE, True)):
        command = ["make", "-n", "demo", "VENV=none"]
        done = subprocess.run(
            command, cwd=ROOT, env=own_environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert [("--quiet" in line) for line in done.stdout.splitlines() if " install " in line] == [quiet] * 3
    os.close(leader)
    os.close(terminal)


def test_gpu_flag_installs_the_default_build_and_runs_on_cuda(make):
    calls, _ = make(GPU="1")
    assert torches(calls) == [f"pip install --quiet {TORCH}"]
    assert calls[-1] == "python -m headwater demo device=cuda"


def test_with_gpu_later_the_build_for_cpus_is_replaced_and_stays_so(make):
    make()
    assert torches(make(GPU="1")[0]) == ["pip uninstall --quiet --yes torch", f"pip install --quiet {TORCH}"]
    calls, _ = make()
    assert calls == ["python -m headwater demo device="]


def test_python_that_is_too_old_is_refused_before_anything_is_installed(make, tmp_path):
    old = tmp_path / "old"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 9, 2); $2"\n')
    old.chmod(0o755)
    calls, printed = make(python=str(old))
    assert calls == []
    assert "Python 3.9 is too old, 3.11 or later is needed: make demo PYTHON=python3.11" in printed


@pytest.mark.parametrize("target", ["test", "test-full"])
def test_network_clients_and_other_engines_have_their_own_targets(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert re.search(r'pytest -m ".*not clients and not peers"', done.stdout), done.stdout + done.stderr


def test_soak_gets_its_settings():
    settings = ["SOAK=1m", "DTYPE=bfloat16", "WEIGHTS=int4", "THREADS=3", "SPECULATION=ngram", "TIER=1"]
    done = subprocess.run(["make", "-n", "soak", *settings], cwd=ROOT, capture_output=True, text=True, timeout=60)
    expected = "-m stress.soak --for 1m --dtype bfloat16 --weights int4 --threads 3 --speculation ngram --tier"
    assert re.findall(r"-m stress\.soak.*", done.stdout) == [expected], done.stdout + done.stderr


def test_soak_has_a_part_with_tiers():
    done = subprocess.run(["make", "-n", "soak"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    both = ["-m stress.soak --for 3m", "-m stress.soak --for 3m --tier"]
    assert re.findall(r"-m stress\.soak.*", done.stdout) == both, done.stdout + done.stderr


def test_help_lists_the_targets_of_contributing_in_80_columns():
    done = subprocess.run(["make", "help"], cwd=ROOT, env=own_environment(), capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("make demo, make demo-cluster: ")
    assert any(line.startswith("make test: ") for line in lines)
    assert max(map(len, lines)) <= 80
