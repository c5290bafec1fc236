"""`headwater doctor`: each finding on machines that are made up, and the whole on this one."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headwater import kernels, machine
from headwater.cli import doctor, machine_findings, run
from headwater.cli.machine_findings import FAIL, OK, SLOW, WARN, Finding, Intended
from tests.processors import AVX2, pretend

INTENDED = Intended(None, 10**9, None, "127.0.0.1", 0)


@pytest.fixture
def cgroup(tmp_path):
    """Files of a control group."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu_DOT_max": "max 100000"}, None),
        ({"cpu_DOT_max": "150000 100000\n"}, 1.5),
        ({"cpu__cpu_DOT_cfs_quota_us": "-1", "cpu__cpu_DOT_cfs_period_us": "100000"}, None),
        ({"cpu__cpu_DOT_cfs_quota_us": "50000", "cpu__cpu_DOT_cfs_period_us": "100000"}, 0.5),
    ],
)
def test_quota_of_cores(cgroup, files, quota):
    assert machine.cpu_quota(cgroup(**files)) == quota


@pytest.mark.parametrize(
    ("own", "folder", "file", "text"),
    [
        ("0::/system.slice/one.service\n", "system.slice", "cpu.max", "200000 100000"),
        ("4:cpu,cpuacct:/box\n0::/\n", "cpu,cpuacct/box", "cpu.cfs_quota_us", "200000"),
    ],
)
def test_quota_of_a_parent_group_counts(tmp_path, own, folder, file, text):
    (tmp_path / "own").write_text(own)
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / file).write_text(text)
    (tmp_path / folder / "cpu.cfs_period_us").write_text("100000")
    assert machine.cpu_quota(tmp_path, tmp_path / "own") == 2


@pytest.mark.parametrize(("quota", "threads"), [(None, None), (2.5, 2), (0.5, 1), (4, None), (9, None)])
def test_quota_bounds_the_threads(monkeypatch, quota, threads):
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert machine.quota_threads() == threads


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"memory_DOT_max": "max\n"}, None),
        ({"memory_DOT_max": "5000\n"}, 5000),
        ({"memory__memory_DOT_limit_in_bytes": "9223372036854771712"}, None),
        ({"memory__memory_DOT_limit_in_bytes": "7000"}, 7000),
    ],
)
def test_limit_of_memory(cgroup, files, limit):
    assert machine.memory_limit(cgroup(**files)) == limit


@pytest.mark.parametrize(("wanted", "level"), [(1, OK), (9 * 10**9, WARN), (11 * 10**9, FAIL)])
def test_doctor_compares_memory_with_the_available_bytes(monkeypatch, wanted, level):
    monkeypatch.setattr(machine_findings, "meminfo", {"MemTotal": 32 * 10**9, "MemAvailable": 10 * 10**9}.get)
    monkeypatch.setattr(machine_findings, "memory_limit", lambda: None)
    assert machine_findings.of_memory(wanted).level == level


def test_memory_is_held_against_the_limit(monkeypatch):
    monkeypatch.setattr(machine_findings, "meminfo", {"MemTotal": 32 * 10**9, "MemAvailable": 10 * 10**9}.get)
    monkeypatch.setattr(machine_findings, "memory_limit", lambda: 2 * 10**9)
    found = machine_findings.of_memory(4 * 10**9)
    assert found.level == FAIL
    assert "limit 2 GB" in found.value


@pytest.mark.parametrize(
    ("threads", "quota", "level", "advice"),
    [
        (None, None, OK, ""),
        (4, None, OK, ""),
        (9, None, WARN, "--threads 4"),
        (None, 2.5, OK, ""),
        (4, 2.5, WARN, "--threads 2"),
        (2, 2.5, OK, ""),
    ],
)
def test_threads_are_held_against_cores(monkeypatch, threads, quota, level, advice):
    monkeypatch.setattr(machine_findings, "usable_cores", lambda: 4)
    monkeypatch.setattr(machine_findings, "cpu_quota", lambda: quota)
    found = machine_findings.of_cores(threads)
    assert found.level == level
    assert advice in found.advice


def test_doctor_warns_of_an_occupied_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert machine_findings.of_port("127.0.0.1", taken.getsockname()[1]).level == WARN
    assert machine_findings.of_port("127.0.0.1", 0).level == OK


@pytest.mark.parametrize(("levels", "code"), [([OK, OK], 0), ([OK, WARN], 0), ([WARN, FAIL], 1)])
def test_doctor_exit_code_is_nonzero_if_a_finding_fails(monkeypatch, capsys, levels, code):
    found = [Finding(f"n{i}", level, "v[1]", "do this") for i, level in enumerate(levels)]
    monkeypatch.setattr(doctor, "examined", lambda intended: found)
    assert run(["doctor"]) == code
    assert "v[1]" in capsys.readouterr().out
    assert run(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    assert [finding["level"] for finding in report["findings"]] == levels


def test_doctor_reports_a_kernel_that_breaks_bits(monkeypatch, tmp_path):
    from headwater.cli import model_findings
    from headwater.engine.proof.selfcheck import SelfCheck
    from tests.cli.test_command_line import TINY

    (tmp_path / "config.json").write_text(json.dumps(TINY))
    spec = model_findings.read_spec(tmp_path, "float32", "cpu", 64)
    broken = SelfCheck(False, "attention at 8 rows", "tiled")
    monkeypatch.setattr(model_findings, "verdict", lambda spec, recheck: broken)
    check, products = model_findings.of_dtype(spec)
    assert check.level == FAIL
    assert "attention at 8 rows" in check.value
    assert "in tiles" in check.value
    assert "GFLOP/s" in products.value


def test_doctor_prints_when_exactness_was_proven_and_recheck_repeats_it(monkeypatch, tmp_path):
    from headwater.cli import model_findings
    from headwater.engine.proof import verdict
    from tests.cli.test_command_line import TINY

    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setenv("HEADWATER_CACHE_DIR", str(tmp_path / "cache"))
    spec = model_findings.read_spec(tmp_path, "float32", "cpu", 64)
    checks = []
    proving = verdict.self_check
    monkeypatch.setattr(verdict, "self_check", lambda *a, **more: checks.append(a) or proving(*a, **more))
    found = [next(model_findings.of_dtype(spec, recheck)) for recheck in (False, False, True)]
    assert len(checks) == 2
    proven = r"deterministic, proven \d{4}-\d\d-\d\d \d\d:\d\d UTC, weights in bfloat16, "
    assert all(re.search(proven, one.value) for one in found)


def test_torchs_bfloat16_without_native_products_is_called_slow_with_the_factor(monkeypatch, tmp_path):
    from headwater.cli import model_findings
    from tests.cli.test_command_line import TINY

    pretend(monkeypatch, AVX2)
    monkeypatch.setattr(kernels, "available", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    levels = {}
    for dtype in ("float32", "bfloat16"):
        _, products = model_findings.of_dtype(model_findings.read_spec(tmp_path, dtype, "cpu", 64))
        levels[dtype] = products.level
    assert levels == {"float32": OK, "bfloat16": SLOW}
    assert re.search(r"\d+\.\d times the time of float32", products.advice)


@pytest.mark.parametrize(("have", "level", "advice"), [(True, OK, ""), (False, SLOW, "install numba")])
def test_machine_without_kernels_is_called_slow(monkeypatch, have, level, advice):
    from headwater.cli import model_findings

    monkeypatch.setattr(kernels, "available", lambda: have)
    found = model_findings.of_kernels()
    assert (found.name, found.level) == ("kernels", level)
    assert have or "7 times slower decoding at 16 bits" in found.value
    assert advice in found.advice
    assert {"numba", "llvmlite"} <= set(machine_findings.PACKAGES)


@pytest.mark.parametrize(
    ("cards", "triton", "level", "value"),
    [
        ([], False, OK, "none that torch can use; the CPU computes"),
        (["NVIDIA L4"], True, OK, "NVIDIA L4, for --device cuda"),
        (["NVIDIA L4"], False, WARN, "NVIDIA L4, but no Triton, which its kernels need"),
    ],
)
def test_cards_are_reported(monkeypatch, cards, triton, level, value):
    from headwater.cli import model_findings

    monkeypatch.setattr(model_findings, "HAS_TRITON", triton)
    monkeypatch.setattr(model_findings.torch.cuda, "is_available", lambda: bool(cards))
    monkeypatch.setattr(model_findings.torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(model_findings.torch.cuda, "get_device_name", cards.__getitem__)
    found = model_findings.of_gpu()
    assert (found.level, found.value) == (level, value)


def test_torch_that_cannot_be_imported_is_a_finding(monkeypatch):
    monkeypatch.setitem(sys.modules, "headwater.cli.model_findings", None)
    assert doctor.examined(INTENDED)[-1].name == "torch"
    assert doctor.examined(INTENDED)[-1].level == FAIL


def test_the_other_commands_need_no_torch():
    program = "import headwater.cli, sys; headwater.cli.run(['doctor', '--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_model_that_is_not_there_is_broken(capsys):
    assert run(["doctor", "--json", "/nonexistent/model"]) == 1
    report = json.loads(capsys.readouterr().out)
    broken = [finding for finding in report["findings"] if finding["level"] == FAIL]
    assert len(broken) == 1
    assert "/nonexistent/model" in broken[0]["value"]
    assert Path("/nonexistent").exists() is False


def test_rotation_is_scaled_as_in_the_server(monkeypatch):
    from headwater.cli import model_findings

    examined = []
    monkeypatch.setattr(model_findings, "of_dtype", lambda spec, recheck: examined.append(spec) or [])
    assert run(["doctor", "--rope-scaling", "yarn:4", "--json"]) in (0, 1)
    assert examined
    for spec in examined:
        assert [layer.rotary.scaling.factor for layer in spec.layers if getattr(layer, "rotary", None)].count(4.0) > 0


def test_invalid_rotation_scaling_ends_with_code_2(capsys):
    assert run(["doctor", "--rope-scaling", "{"]) == 2
    assert "rope_scaling is '{', must be KIND:FACTOR" in capsys.readouterr().err
