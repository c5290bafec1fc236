"""The container file and the systemd unit name what exists, and leave time to drain."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
import typer
from packaging.requirements import Requirement

from headwater.cli import commands
from headwater.cli.deploy import FOLDER
from headwater.cli.settings import NOT_SETTINGS
from headwater.config import SETTINGS, WEIGHTS, ServeConfig
from headwater.server.http.process import CLOSING_SECONDS
from tests.forked import address, listening
from tests.test_serve import started

ROOT = Path(__file__).parents[1]
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
UNIT = FOLDER / "headwater.service"
# In a container: serve until the health check passes, then stop.
SERVED = """headwater serve --memory 200MB & for i in $(seq 60); do
  if python -c "$CHECK" 2>/dev/null; then kill $!; wait $!; echo $(id -u) healthy; exit; fi; sleep 1
done; exit 1"""
COMPILED = "find $HEADWATER_CACHE_DIR/kernels -name '*.nbc' -user headwater | wc -l"
VARIABLES = {*(one.variable for one in SETTINGS), *NOT_SETTINGS}


def instructions(name):
    """Return the arguments of each instruction of that name, its lines joined."""
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#")))
    return re.findall(rf"^{name} (.*)$", joined, re.M)


def options(command):
    """Return the options of a command of `headwater`."""
    return {opt for parameter in typer.main.get_command(commands).commands[command].params for opt in parameter.opts}


def flags(text):
    return set(re.findall(r"(?<= )--[a-z-]+", text))


def test_image_is_made_of_files_that_exist_and_are_let_in():
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert instructions("COPY") == [". /src"]
    assert all((ROOT / source).exists() for source in let_in)
    assert {"pyproject.toml", "src"} <= let_in


def test_images_torch_and_extras_are_the_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = re.findall(r"^TORCH := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    (install, package) = (run for run in instructions("RUN") if run.startswith("pip "))
    assert f" {torch} " in install
    assert install.endswith(" --index-url $TORCH_INDEX")
    assert instructions("ARG") == ["TORCH_INDEX=https://download.pytorch.org/whl/cpu"]
    extras = re.search(r"\)\[([\w,]+)\]\"", package)[1].split(",")
    assert {"serve", "eval", "otel", "redis"} == set(extras) <= set(project["optional-dependencies"])


def test_image_runs_the_command_without_root_on_its_exposed_port():
    assert instructions("ENTRYPOINT") == ['["headwater"]']
    (command,) = map(json.loads, instructions("CMD"))
    assert command[0] in typer.main.get_command(commands).commands
    assert instructions("USER") == ["headwater"]
    (environment,) = instructions("ENV")
    assert set(re.findall(r"HEADWATER_\w+", DOCKERFILE)) <= VARIABLES
    (port,) = instructions("EXPOSE")
    assert f"HEADWATER_PORT={port}" in environment
    assert int(port) == ServeConfig().port


def test_pinned_torch_is_one_that_the_package_accepts():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (accepted,) = (one for one in map(Requirement, project["optional-dependencies"]["serve"]) if one.name == "torch")
    (pinned,) = re.findall(r"^TORCH := torch==(.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert pinned in accepted.specifier
    bounds = [accepted.specifier.contains(version) for version in ("2.12.9", "2.13.0", "2.15.1", "2.16.0")]
    assert bounds == [False, True, True, False], "both ends are tested: see CONTRIBUTING.md"


@pytest.mark.full
def test_image_is_built_and_runs(tmp_path):
    """With buildah, which needs no daemon, and the pip of this machine's indexes."""
    (base,) = instructions("FROM")
    if shutil.which("buildah") is None:
        pytest.skip("no buildah here to build the image")
    buildah = ["buildah", "--storage-driver", "vfs"]
    if subprocess.run([*buildah, "inspect", "--type", "image", base], capture_output=True).returncode:
        pytest.skip(f"no image {base} here to build from")
    mounts, index = pip_of_this_machine(tmp_path)
    options = ["--pull-never", "--isolation", "chroot", "--network", "host", *mounts, *index]
    build = [*buildah, "bud", *options, "-t", "headwater-test", "-f", FOLDER / "Dockerfile", ROOT]
    subprocess.run(build, check=True)
    new = subprocess.run([*buildah, "from", "--pull-never", "headwater-test"], capture_output=True, text=True)
    container = new.stdout.strip()
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        (check,) = instructions("HEALTHCHECK")
        variables = {
            "HEADWATER_HOST": "127.0.0.1",
            "HEADWATER_PORT": port,
            "CHECK": json.loads(check.split("CMD ", 1)[1])[2],
        }
        environment = [option for name, value in variables.items() for option in ("--env", f"{name}={value}")]
        run = [*buildah, "run", "--isolation", "chroot", "--network", "host", *environment, container, "--", "sh", "-c"]
        compiled = subprocess.run([*run, COMPILED], capture_output=True, text=True)
        assert int(compiled.stdout) > 0, compiled.stderr
        done = subprocess.run([*run, SERVED], capture_output=True, text=True)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "10001 healthy"), done.stdout + done.stderr
    finally:
        subprocess.run([*buildah, "rm", container], capture_output=True)


def pip_of_this_machine(folder):
    """Return options of a build by which its pip finds packages where this one does, and an index with torch."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    configured = dict(re.findall(r"^(?::env:|global)\.([\w-]+)='(.*)'$", done.stdout, re.M))
    (folder / "pip.conf").write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in configured.items()))
    local = set(re.findall(r"(?<![\w/])(?:file://)?(/[\w/.-]+)", " ".join(configured.values())))
    local = {path.removesuffix("/simple") for path in local}  # an index's files lie next to its pages
    volumes = {f"{folder / 'pip.conf'}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in local)}
    index = ["--build-arg", "TORCH_INDEX=https://pypi.org/simple"] if "find-links" in configured else []
    return [option for volume in sorted(volumes) for option in ("--volume", volume)], index


def step_that_compiles():
    (compiles,) = (run for run in instructions("RUN") if "headwater doctor" in run)
    return compiles


def test_image_compiles_kernels_of_all_formats_as_its_user():
    compiles = step_that_compiles()
    assert re.search(r"for weights in ([\w ]+);", compiles)[1].split() == list(WEIGHTS)
    assert flags(compiles) == {"--weights", "--memory"} <= options("doctor")
    parts = ("useradd ", "-o headwater /var/cache/headwater", "USER headwater", "HEADWATER_CACHE_DIR=", compiles)
    places = [DOCKERFILE.index(part) for part in parts]
    assert places == sorted(places)


@pytest.mark.full
def test_server_after_the_images_step_compiles_nothing(tmp_path):
    variables = {"HEADWATER_CACHE_DIR": str(tmp_path / "cache"), "NUMBA_CACHE_DIR": ""}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["sh", "-c", step_that_compiles()], env={**os.environ, "PATH": path, **variables}, check=True)
    compiled = sorted(tmp_path.rglob("*.nbc"))
    assert compiled
    chat = {"messages": [{"role": "user", "content": "Where does the river begin?"}], "logprobs": True}
    for weights in WEIGHTS:
        for dtype in ("float32", "bfloat16"):
            with listening(started("--port", "0", "--weights", weights, "--dtype", dtype, **variables)) as (_, said):
                for extra in ({"temperature": 0}, {"top_p": 0.9, "top_k": 50, "seed": 1, "frequency_penalty": 0.5}):
                    reply = httpx.post(f"{address(said)}/chat/completions", json=chat | extra, timeout=300)
                    assert reply.status_code == 200, reply.text
    assert sorted(tmp_path.rglob("*.nbc")) == compiled


def test_images_health_check_is_a_program():
    (check,) = instructions("HEALTHCHECK")
    command = json.loads(check.split("CMD ", 1)[1])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "HEALTHCHECK", "exec")
    assert "/health'" in command[2]


def test_example_above_the_image_uses_flags_that_exist():
    (example,) = re.findall(r"headwater serve /model (.*)", DOCKERFILE)
    assert flags(f" {example}") == {"--memory"} <= options("serve")


def test_both_are_given_longer_to_stop_than_requests_to_end():
    needed = ServeConfig().drain + CLOSING_SECONDS
    assert int(re.search(r"--stop-timeout (\d+)", DOCKERFILE)[1]) > needed
    assert int(re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.M)[1]) > needed


def test_unit_starts_the_command_with_settings_that_exist():
    (start,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.M)
    assert start.split()[1] == "serve"
    assert flags(start) == {"--config"} <= options("serve")
    assert set(re.findall(r"HEADWATER_[A-Z_]+", UNIT.read_text())) <= VARIABLES


def test_image_keeps_models_in_the_folder_of_its_volume():
    (environment,) = instructions("ENV")
    (folder,) = re.findall(r"HEADWATER_CACHE_DIR=(\S+)", environment)
    assert f"-v headwater-cache:{folder}" in DOCKERFILE
    assert f" HF_HOME={folder}/" in " ".join(environment.split())


def test_systemd_unit_has_folders_for_the_proof_and_models():
    lines = UNIT.read_text().splitlines()
    assert "Environment=HF_HOME=%C/headwater/huggingface" in lines
    assert "CacheDirectory=headwater" in lines  # systemd sets CACHE_DIRECTORY
    assert "CacheDirectoryMode=0700" in lines


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here to verify the unit")
def test_unit_is_one_that_systemd_takes(tmp_path):
    unit = tmp_path / "headwater.service"
    unit.write_text(UNIT.read_text().replace("/opt/headwater/bin/headwater", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
