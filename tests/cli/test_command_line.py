"""The command line: what it takes, what it prints, and how it refuses."""

import json
import logging
import re
import shlex
import shutil
import socket
import subprocess
import sys

import pytest

from headwater import machine
from headwater.cli import run, serve
from headwater.cli.inspect import read_spec
from headwater.cli.serve import announce
from headwater.config import SETTINGS, ServeConfig
from headwater.models import load
from headwater.models.files import embedded
from headwater.setting import SettingError
from tests.forked import headwater

TINY = {
    "model_type": "qwen3_5_text",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 16384,
    "dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def refusal(capsys, *arguments):
    """The one line on stderr of a command that exits with 2; `serve` may have announced what it loads."""
    assert run(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" or printed.out.startswith("Headwater ")
    (line,) = printed.err.splitlines()
    assert line.startswith("headwater: ")
    return line


def test_help_of_serve_has_the_settings_in_groups(capsys):
    assert run(["serve", "--help"]) == 0
    printed = capsys.readouterr().out
    groups = list(dict.fromkeys(one.group for one in SETTINGS))
    assert re.findall(r"^(\w[\w ]*):$", printed, re.M) == [*groups, "Other"]
    words = " ".join(printed.split())
    for one in SETTINGS:
        assert one.help in words, one.name
    assert "[canonical, raw, none; default: canonical]" in words
    assert "HEADWATER_MAX_RUNNING" in words


GROUPS = ("", "bench", "cluster", "tiers")
SINGLE = ("serve", "chat", "doctor", "eval", "fidelity", "inspect", "bench serve", "replay", "size", "fit", "profiles")


@pytest.mark.parametrize("command", [*GROUPS, *SINGLE])
def test_help_fits_80_columns_and_cuts_no_sentence(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*command.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    if command in GROUPS:
        assert not any(line.endswith("...") for line in lines[1:])


def test_settings_come_from_flags_environment_and_file(capsys, monkeypatch, tmp_path):
    file = tmp_path / "some.toml"
    file.write_text("max_running = 3\nmax_waiting = 5\nthreads = 1")
    monkeypatch.setenv("HEADWATER_CONFIG", str(file))
    monkeypatch.setenv("HEADWATER_MAX_WAITING", "6")
    assert run(["serve", "--print-config", "--max-running", "4", "--no-cache"]) == 0
    printed = capsys.readouterr().out
    assert "max_running = 4  # --max-running\n" in printed
    assert "max_waiting = 6  # HEADWATER_MAX_WAITING\n" in printed
    assert f"threads = 1  # {file}\n" in printed
    assert "\ncache = false  # --no-cache\n" in printed


def test_misspelt_variable_is_a_warning(capsys, monkeypatch):
    monkeypatch.setenv("HEADWATER_PROT", "1")
    assert run(["serve", "--print-config"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "headwater: warning: the variable HEADWATER_PROT is not a setting; the nearest is 'HEADWATER_PORT'"


def test_version_and_help(capsys):
    assert run(["--version"]) == 0
    assert re.fullmatch(r"headwater \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert run([]) == run(["--help"]) == 0
    assert "serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["serve", "--bogus"], "--bogus"),
        (["bogus"], "bogus"),
        (["serve", "/nonexistent/model"], "/nonexistent/model"),
        (["serve", "--memory", "4XB"], "4XB"),
        (["serve", "--port", "abc"], "--port"),
        (["serve", "--page-size", "60"], "60"),
        (["serve", "--eviction", "newest"], "newest"),
        (["serve", "--placement", "nowhere"], "nowhere"),
        (["serve", "--config", "/nonexistent/file"], "/nonexistent/file"),
        (["serve", "--uds", __file__], "not a socket"),
        (["serve", "--tls-cert", __file__, "--tls-key", __file__], "tls_cert is"),
        (["inspect", "/nonexistent/model"], "/nonexistent/model"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(capsys, arguments, part):
    assert part in refusal(capsys, *arguments)


def test_setting_beyond_the_machine_is_refused_with_its_source(capsys, monkeypatch, folder):
    def lacking(config):
        raise SettingError("memory", "'5TB'", "more than there is")

    monkeypatch.setattr(serve, "serve_until_stopped", lacking)
    line = refusal(capsys, "serve", str(folder), "--memory", "5000GB")
    assert "memory is '5TB' (from --memory), more than there is" in line


def test_broken_chat_template_is_refused_before_the_weights_are_read(monkeypatch, folder, capsys):
    monkeypatch.setattr(serve, "load_engine", lambda config: pytest.fail("the weights were read"))
    shutil.copy(embedded() / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")
    assert "chat template does not compile" in refusal(capsys, "serve", str(folder), "--port", "0")


def test_first_line_names_the_threads_of_a_quota(monkeypatch, folder, capsys):
    monkeypatch.setattr(serve, "quota_threads", lambda: 2)
    monkeypatch.setattr(serve, "cpu_quota", lambda: 2.5)
    announce(ServeConfig(model=folder))
    assert "Computing on 2 threads: the processes of this control group may use 2.5 cores" in capsys.readouterr().out


def test_memory_for_few_prompts_is_a_warning(folder, capsys):
    announce(ServeConfig(model=folder, memory=1_000_000))
    printed = capsys.readouterr().out
    assert "Warning: memory is 1 MB, little is cached:\n4 prompts of 2,048 tokens with a checkpoint" in printed
    announce(ServeConfig(model=folder, memory=4_000_000_000))
    assert "Warning" not in capsys.readouterr().out


def test_profile_as_a_model_is_refused_with_its_repository_and_inspected(capsys):
    assert run(["serve", "qwen3.5-9b"]) == 2
    said = capsys.readouterr().err
    assert "qwen3.5-9b is a profile, which has sizes but no weights" in said
    assert "its weights are Qwen/Qwen3.5-9B" in said
    assert run(["inspect", "qwen3.5-9b"]) == 0
    assert "51,511,296" in capsys.readouterr().out


def test_missing_extra_is_refused_before_the_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(serve, "load_engine", lambda *_: pytest.fail("the model is loaded"))
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert run(["serve", "--port", "0", "--otlp-endpoint", "http://127.0.0.1:9"]) == 2
    assert "pip install 'headwater[otel]'" in capsys.readouterr().err


def test_first_lines_at_start_import_no_torch_or_web_framework(folder):
    """Run only them: the imports that follow in a real start take a second or two."""
    program = (
        "import sys; from pathlib import Path; from headwater.cli.serve import announce; "
        "from headwater.config import ServeConfig; announce(ServeConfig(model=Path(sys.argv[1]))); "
        "print([name for name in ('torch', 'fastapi', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=True)
    first, dtype, weights, fewer, heavy = done.stdout.splitlines()
    assert first.startswith("Headwater ")
    assert first.endswith(f"loading {folder}")
    assert re.fullmatch(r"Computing in \w+: .+", dtype)
    assert re.fullmatch(r"Weights are held in bfloat16, as stored: [\d.]+ kB", weights)
    assert re.fullmatch(r"--weights would save: int8 [\d.]+ kB \(\d+%\), int4 [\d.]+ kB \(\d+%\)", fewer)
    assert max(map(len, (dtype, weights, fewer))) <= 80
    assert heavy == "[]"


def test_occupied_port_is_refused_before_the_model_is_loaded(capsys, folder):
    handlers = logging.getLogger().handlers[:]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refusal(capsys, "serve", str(folder), "--port", str(port))
    assert logging.getLogger().handlers == handlers, "logging is set up by a server that listens only"


def test_broken_config_is_named(capsys, folder):
    (folder / "config.json").write_text("{oops")
    assert "config.json" in refusal(capsys, "inspect", str(folder))
    (folder / "config.json").write_text(json.dumps({**TINY, "hidden_size": None}))
    assert "hidden_size" in refusal(capsys, "inspect", str(folder))


def test_memory_below_one_page_is_refused_with_both_numbers(capsys, folder):
    line = refusal(capsys, "inspect", str(folder), "--memory", "100B")
    assert "100" in line
    assert f"{read_spec(folder, 'auto', 64).page_bytes:,}" in line


def test_inspect_prints_the_sizes_of_the_spec(capsys, folder):
    assert run(["inspect", str(folder), "--memory", "10MB"]) == 0
    printed = capsys.readouterr().out
    spec = read_spec(folder, "auto", 64)
    assert f"computed in {spec.dtype_name}: " in printed
    pages = 10_000_000 // spec.page_bytes
    for number in (spec.kv_bytes_per_token, spec.page_bytes, spec.checkpoint_bytes, spec.weight_bytes):
        assert f" {number:,} " in printed
    assert f" {pages * 64:,} " in printed
    assert f" {pages // spec.checkpoint_pages:,} " in printed
    assert "8,192" in printed
    assert "32,768" not in printed  # longer than the model


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_inspect_counts_weights_as_they_are_held(capsys, folder, weights):
    assert run(["inspect", str(folder), "--weights", weights]) == 0
    printed = capsys.readouterr().out
    spec, stored = (read_spec(folder, "auto", 64, held) for held in (weights, "auto"))
    assert re.search(rf"weights, {weights} +│ +{spec.weight_bytes:,} ", printed)
    assert f" {stored.page_bytes:,} " in printed
    assert f" {stored.checkpoint_bytes:,} " in printed
    assert spec.weight_bytes < stored.weight_bytes


def test_unknown_weights_format_is_refused_with_the_known_ones(capsys, folder):
    for command in ("inspect", "doctor", "fidelity", "eval"):
        line = refusal(capsys, command, str(folder), "--weights", "int3")
        assert "weights is 'int3'" in line
        assert "must be one of auto, int8, int4" in line


def test_start_with_fewer_bits_prints_both_sizes(capsys, folder):
    announce(ServeConfig(model=folder, weights="int4"))
    line = capsys.readouterr().out.splitlines()[2]
    assert re.fullmatch(r"Weights are held in int4, as --weights says: [\d.]+ kB, as stored [\d.]+ kB", line)


@pytest.mark.parametrize(("n_bytes", "text"), [(9_090_000, "9.09 MB"), (999, "999 bytes"), (1.234e12, "1,230 GB")])
def test_sizes_are_printed_in_fitting_units(n_bytes, text):
    assert machine.in_units(n_bytes) == text


def test_inspect_takes_the_dtype_it_is_given(folder):
    single, half = (read_spec(folder, dtype, 64) for dtype in ("float32", "bfloat16"))
    assert single.kv_bytes_per_token == 2 * half.kv_bytes_per_token


@pytest.mark.parametrize(("features", "dtype"), [(("avx2",), "float32"), (("avx512_bf16",), "bfloat16")])
def test_inspect_takes_the_dtype_that_serve_does(folder, monkeypatch, features, dtype):
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("pretended", features))
    assert read_spec(folder, "auto", 64).dtype_name == dtype == load.read_spec(folder).dtype_name


def test_commands_without_computation_import_no_torch_or_web_framework(folder):
    """One process for all commands: what one of them imports is there at the end."""
    commands = [["--help"], ["serve", "--help"], ["serve", "--print-config"], ["inspect", "."]]
    program = (
        f"from headwater.cli import run; import sys; codes = [run(arguments) for arguments in {commands!r}]; "
        "print(codes, *({'torch', 'fastapi', 'uvicorn', 'matplotlib'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=folder)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0]"


def completions(line):
    """Return the completions of a line that ends in an unfinished word."""
    words = line.split(" ")
    asked = {"_HEADWATER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return headwater(**asked).stdout.split()


def test_shell_completes_commands_options_and_choices():
    assert "serve" in completions("headwater se")
    assert completions("headwater serve --pag") == ["--page-size"]
    assert completions("headwater serve --decode-reuse ") == ["canonical", "raw", "none"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_shell_is_given_its_script():
    command = f"{shlex.quote(sys.executable)} -m headwater --show-completion; true"  # bash stays the parent
    script = subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout
    assert "_HEADWATER_COMPLETE=complete_bash" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
