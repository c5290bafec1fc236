"""Scripts outside the package: each imports, shows its options and does its smallest run."""

import importlib
import importlib.util
import json
import runpy
import shutil
import subprocess
import sys
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import measure
from benchmarks import run as make_bench
from headwater.models.files import embedded
from papers import results

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "examples", "stress", "training")
SHARED = ROOT.parent / "shared"
PEERS = [str(path) for path in sorted(SHARED.glob("peers/serve/results/*.json"))]
# The smallest run of a script, where that is not `--small --repeats 1`; OUT is a folder with the log of a training run.
SMALL_ON_DATA = ["--small", "--repeats", "1", "--data", str(SHARED / "data")]
SMALLEST = {
    "benchmarks.ablation": ["--small", "--seeds", "0", "--jobs", "1", "--out", "OUT/ablation.json"],
    "benchmarks.card": ["--small", "--repeats", "1", "--device", "cpu", "--out", "OUT/card.json"],
    "benchmarks.comparison": ["OUT/ours.json", *PEERS, "--out", "OUT/page.md", "--figures", "OUT/figures.json"],
    "benchmarks.decisions": ["--small", "--out", "OUT/decisions.json"],
    "benchmarks.drafting": ["--small", "--data", str(SHARED / "data"), "--out", "OUT/drafting.json"],
    "benchmarks.hand_over": ["--tokens", "512", "--out", "OUT/hand_over.json"],
    "benchmarks.path_files": ["--list"],
    "benchmarks.parallel_segments": ["--seeds", "2", "--out", "OUT/parallel_segments.json"],
    "benchmarks.grid": ["--small", "--seeds", "0-1"],
    "benchmarks.policies": ["--small", "--traces", "mini_swe_agent"],
    "benchmarks.policy_map": ["--small", "--jobs", "1", "--out", "OUT/map.json", "--image", "OUT/map.png"],
    "benchmarks.speculation": [*SMALL_ON_DATA, "--out", "OUT/speculation.json"],
    "benchmarks.routers": ["--small", "--out", "OUT/routers.json"],
    "benchmarks.pulls": ["--megabytes", "20", "--repeats", "1", "--out", "OUT/pull_cost.json"],
    "benchmarks.families": ["--out", "OUT/families.md"],
    "benchmarks.run": ["--small", "index"],
    "benchmarks.segment_choices": ["--prompts", "1"],
    "benchmarks.segment_quality": ["--every", "40", "--out", "OUT"],
    "benchmarks.segment_states": ["hypic-table2", "--out", "OUT"],
    "benchmarks.served_cells": ["--small"],
    "benchmarks.served_policies": [*SMALL_ON_DATA, "--out", "OUT/served_policies.json"],
    "benchmarks.segments": ["--small", "--repeats", "1", "--out", "OUT"],
    "benchmarks.sparse": [*SMALL_ON_DATA, "--out", "OUT"],
    "examples.demo": [],
    "examples.demo_cluster": ["--workers", "2"],
    "stress.four_ways": ["--requests", "6"],
    "examples.screenshot": ["--seconds", "10", "--out", "OUT/page.png"],
    "stress.fuzz.__main__": ["--for", "2s", "config"],
    "stress.fuzz.drive": ["config", "-runs=20"],
    "stress.memory": ["--requests", "2000", "--over-http", "100"],
    "stress.soak": ["--for", "60s", "--visits", "30", "--clients", "4"],
    "stress.tenant_timing": ["--trials", "40"],
    "training.__main__": ["--recipe", "smoke", "--no-compile", "--out", "OUT/run"],
    "benchmarks.weights": ["--small", "--repeats", "1", "--out", "OUT/weights.json"],
    "training.curve": ["OUT", "OUT/curve.png"],
    "training.mtp": ["--model", str(embedded()), "--recipe", "smoke-head", "--no-compile", "--out", "OUT/head"],
    "training.evaluation_set": ["OUT/set.jsonl.zst", "--items", "1"],
}
RESULTS = ["--small", "--repeats", "1", "--out", "OUT/results.json"]
OF_TRAFFIC = (
    "benchmarks.ablation",
    "benchmarks.drafting",
    "benchmarks.grid",
    "benchmarks.lab",
    "benchmarks.policies",
    "benchmarks.policy_map",
    "benchmarks.served_cells",
    "benchmarks.served_policies",
    "benchmarks.sparse",
    "benchmarks.speculation",
)
NEEDS = {  # what a script cannot run without, and whether it is here
    "benchmarks.comparison": ("peers' results", PEERS),
    **dict.fromkeys(OF_TRAFFIC, ("traffic", SHARED.exists())),
    "examples.demo_cluster": ("ray", importlib.util.find_spec("ray")),
    "examples.screenshot": ("chromedriver", shutil.which("chromedriver")),
    **dict.fromkeys(("stress.fuzz.__main__", "stress.fuzz.drive"), ("atheris", importlib.util.find_spec("atheris"))),
}


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
def test_script_imports_and_prints_its_options(
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
    shown = capsys.readouterr().out
    assert "usage:" in shown
    if module.removeprefix("benchmarks.") in make_bench.QUESTIONS:
        assert all(option in shown for option in ("--out", "--repeats", "--small"))


def bench(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[list[str]]:
    """Run `make bench` with benchmarks that write no figure, and return their command lines."""
    commands: list[list[str]] = []

    def write(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command[2:])
        Path(command[command.index("--out") + 1]).write_text('{"run": {}, "rows": []}')
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(make_bench.subprocess, "run", write)
    monkeypatch.setattr(make_bench.measure, "machine", dict)
    monkeypatch.setattr(sys, "argv", ["run", "--small", *options])
    make_bench.main()
    return commands


def test_make_bench_asks_each_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = bench(monkeypatch, "--data", str(tmp_path))
    assert {"weights", "drafting"} < make_bench.QUESTIONS.keys()
    assert [command[0] for command in commands] == [f"benchmarks.{name}" for name in make_bench.QUESTIONS]
    assert all(command[-3:] == ["--repeats", "1", "--small"] for command in commands if "--data" not in command)
    assert [command[0] for command in commands if "--data" in command] == [
        "benchmarks.drafting",
        "benchmarks.speculation",
    ]


def test_make_bench_leaves_recorded_traffic_out_if_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(monkeypatch, "drafting", "--data", str(tmp_path / "none")) == []
    assert "drafting: left out" in capsys.readouterr().out


@pytest.mark.parametrize(("small", "at", "writes"), [(True, "kept", False), (False, "kept", True), (True, "out", True)])
def test_smallest_run_replaces_no_results(
    small: bool, at: str, writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "kept")
    monkeypatch.setattr(results, "origin", lambda: {"commit": "abc", "tree": "clean"})
    out = tmp_path / at / "figures.json"
    out.parent.mkdir(exist_ok=True)
    given = SimpleNamespace(seed=0, repeats=1, small=small, out=out, begun=measure.cpu_seconds())
    measure.report(given, [measure.Row("time", "ms", [1.0])])
    assert out.exists() == writes


def test_instant_engine_has_the_submit_parameters_of_workers() -> None:
    """Its smallest run is not part of `make test`, and workers give all arguments by place."""
    pytest.importorskip("zmq")
    from benchmarks.routing import InstantEngine
    from headwater.cluster.worker import WorkingEngine

    given, taken = (list(signature(of.submit).parameters) for of in (WorkingEngine, InstantEngine))
    assert taken == given


@pytest.mark.full
@pytest.mark.parametrize("module", filter(is_script, modules()))
def test_script_completes_its_smallest_run(module: str, tmp_path: Path) -> None:
    needed, here = NEEDS.get(module, ("", True))
    if not here:
        pytest.skip(f"no {needed} here")
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps({"step": i, "tokens": 10, "loss": 4.0 - i}) + "\n" for i in range(3))
    )
    if PEERS:  # ours is not stored with them: another server's results stand in
        vllm = json.loads((SHARED / "peers" / "serve" / "results" / "vllm.json").read_text())
        (tmp_path / "ours.json").write_text(json.dumps({**vllm, "name": "headwater"}))
    options = [option.replace("OUT", str(tmp_path)) for option in SMALLEST.get(module, RESULTS)]
    command = [sys.executable, "-m", module.removesuffix(".__main__"), *options]
    if module.startswith("examples."):
        command[1:3] = [str(ROOT / module.replace(".", "/")) + ".py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
