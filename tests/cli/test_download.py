"""Models by name: the files fetched from a hub, continued downloads, and refusals."""

import io
import json
import os
import shutil
import sys
import types
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from rich.console import Console
from safetensors.torch import save

from headwater.cli import models as cli_models
from headwater.cli import run
from headwater.cli.models import config_folder, named, whole_folder
from headwater.cli.settings import as_toml, effective
from headwater.errors import CheckpointError, DownloadError
from headwater.hub_name import HubName
from headwater.models import download
from headwater.models.files import EMBEDDED_FOLDER
from headwater.models.hub import cached, explained, folder_of
from tests.hub_mirror import mirror, sha256

NAME = HubName("some-org/some-model")
WEIGHTS = os.urandom(100_000)
CONFIG = (EMBEDDED_FOLDER / "config.json").read_bytes()
FILES = {
    "config.json": CONFIG,
    "generation_config.json": b"{}",
    "tokenizer.json": b"{" + b" " * 3_000 + b"}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
}
LONG = 200_000  # bytes of weights: a header is read with the first 100,000 bytes of its file
OTHERS = {
    "README.md": b"A model.",
    ".gitattributes": b"",
    "pytorch_model.bin": b"pickled",
    "consolidated.safetensors": b"the same again",
    "model-q4.gguf": b"GGUF",
    "onnx/model.onnx": b"onnx",
    "original/model.safetensors": b"the same again",
    "modeling_some.py": b"print('never run')",
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A mirror with one model, instead of huggingface.co, and an empty cache."""
    with mirror() as found:
        found.add(NAME.repository, FILES | OTHERS)
        for name, value in {
            "ENDPOINT": found.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": found.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_DISABLE_TELEMETRY": True,
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(download, "PAUSE", 0.0)
        monkeypatch.chdir(tmp_path)
        yield found


def refusal(capsys, *arguments):
    """The last line of a command that exits with 2; it fits two lines of 80 columns."""
    assert run(list(arguments)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("headwater: ")
    assert len(line.replace(constants.HF_HUB_CACHE, "/root/.cache/huggingface/hub")) <= 160
    return line


def breaking(sizes):
    """Cut answers with weights after these numbers of bytes, one answer after the other; the last one is repeated."""
    return lambda path: None if not path.endswith("model.safetensors") else sizes.pop(0) if sizes[1:] else sizes[0]


def test_model_is_downloaded_at_one_commit_with_needed_files_only(hub, capsys):
    folder = whole_folder(NAME)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert folder.name == "a" * 40
    files = [one for one in hub.log if "/resolve/" in one.path]
    assert {one.path.split("/")[4] for one in files} == {"a" * 40}
    assert len(hub.log) - len(files) == 1  # one listing
    said, *_ = capsys.readouterr().err.splitlines()
    left = sum(map(len, FILES.values())) - len(CONFIG)
    assert said == f"{NAME}, commit aaaaaaaaaaaa: 5 files, {left:,} bytes, to {constants.HF_HUB_CACHE}"


def test_model_in_the_cache_needs_no_network(hub, monkeypatch):
    folder, asked = whole_folder(NAME), len(hub.log)
    assert whole_folder(NAME) == config_folder(NAME) == folder_of(NAME) == folder
    assert len(hub.log) == asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert whole_folder(NAME) == folder


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_model_in_the_cache_that_lacks_a_file_is_completed(hub, name):
    folder = whole_folder(NAME)
    (folder / name).resolve().unlink()
    assert cached(NAME) is None
    with pytest.raises(DownloadError, match=f"{NAME} is not complete in the cache: `headwater serve {NAME}`"):
        folder_of(NAME)
    assert (whole_folder(NAME) / name).read_bytes() == FILES[name]


def test_only_the_files_of_the_index_are_fetched(hub):
    shards = {f"model-0000{i}-of-00002.safetensors": os.urandom(5_000) for i in (1, 2)}
    index = {"weight_map": dict(zip("abc", [*shards, *shards], strict=False))}
    files = {name: content for name, content in FILES.items() if name != "model.safetensors"}
    files |= shards | {"model.safetensors.index.json": json.dumps(index).encode()}
    hub.add("org/sharded", files | OTHERS | {"model-00001-of-00009.safetensors": b"of another export"})
    folder = whole_folder(HubName("org/sharded"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_broken_connection_continues_with_the_missing_bytes(hub):
    hub.cut = breaking([30_000, 20_000, len(WEIGHTS)])
    assert (whole_folder(NAME) / "model.safetensors").read_bytes() == WEIGHTS
    assert [one.first for one in hub.asked("model.safetensors")] == [0, 30_000, 50_000]


def test_the_same_command_continues_a_download_that_broke_off(hub, capsys):
    hub.cut = breaking([30_000, 0])
    line = refusal(capsys, "fidelity", str(NAME))
    assert "model.safetensors of some-org/some-model broke off at 30,000 of 100,000 bytes" in line
    assert line.endswith("the same command continues")
    del hub.log[:]
    hub.cut = lambda path: None
    assert (whole_folder(NAME) / "model.safetensors").read_bytes() == WEIGHTS
    assert [one.first for one in hub.asked("model.safetensors")] == [30_000]
    assert hub.asked("tokenizer.json") == []
    assert "1 file, 70,000 bytes" in (said := capsys.readouterr().err)
    assert "; 30,000 more are there from an earlier download" in said


def test_two_that_download_the_same_model_fetch_its_weights_once(hub):
    hub.pause = 50_000
    with ThreadPoolExecutor(2) as pool:
        folders = [pool.submit(whole_folder, NAME) for _ in "12"]
        assert hub.paused.wait(60)
        hub.resumed.set()
        assert {(one.result() / "model.safetensors").read_bytes() for one in folders} == {WEIGHTS}
    assert [one.first for one in hub.asked("model.safetensors")] == [0]


def test_hub_without_ranges_sends_the_file_again(hub):
    hub.ranges = False
    hub.cut = breaking([30_000, len(WEIGHTS)])
    assert (whole_folder(NAME) / "model.safetensors").read_bytes() == WEIGHTS
    assert [(one.first, one.status) for one in hub.asked("model.safetensors")] == [(0, 200), (0, 200)]


def test_file_that_arrives_damaged_is_deleted_and_fetched_again(hub):
    folder = config_folder(NAME)
    part = folder.parents[1] / "blobs" / f"{sha256(WEIGHTS)}.incomplete"
    part.write_bytes(b"wrong")
    with pytest.raises(DownloadError, match=r"model\.safetensors of .* arrived damaged and was deleted"):
        whole_folder(NAME)
    assert not part.exists()
    assert (whole_folder(NAME) / "model.safetensors").read_bytes() == WEIGHTS


def test_file_without_a_hash_is_fetched_by_the_library(hub):
    hub.models[NAME.repository].files["model.safetensors"] = b"small"
    assert (whole_folder(NAME) / "model.safetensors").read_bytes() == b"small"


def test_interrupted_download_prints_the_bytes_left(hub, capsys, monkeypatch):
    def interrupted(futures):
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "as_completed", interrupted)
    hub.cut = breaking([30_000, 0])
    assert run(["fidelity", str(NAME)]) == 130
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"{NAME}: interrupted with ")
    assert line.endswith(" bytes left; the same command continues")


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(hub, capsys, monkeypatch):
    monkeypatch.setattr(cli_models, "LINE_SECONDS", 0)
    folder = whole_folder(NAME)
    total = sum(map(len, FILES.values())) - len(CONFIG)
    assert f"\n{total:,} of {total:,} bytes, " in capsys.readouterr().err
    (folder / "model.safetensors").resolve().unlink()
    screen = io.StringIO()
    monkeypatch.setattr(cli_models, "progress_console", Console(file=screen, force_terminal=True, width=80))
    whole_folder(NAME)
    assert "downloading" in screen.getvalue()
    assert "100.0/100.0 kB" in screen.getvalue()


def test_doctor_reports_a_model_that_cannot_be_downloaded(hub, capsys):
    hub.refuse = lambda path: (404, {})
    assert run(["doctor", str(NAME), "--json"]) == 1
    *_, finding = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["level"], finding["value"]) == ("FAIL", f"{UNKNOWN.format(url=hub.url)}OKEN")


def test_revision_is_resolved_to_its_commit_and_kept(hub, monkeypatch):
    hub.models[NAME.repository].revisions["v1"] = "b" * 40
    folder = whole_folder(HubName(NAME.repository, "v1"))
    assert folder.name == "b" * 40
    assert cached(NAME) is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert whole_folder(HubName(NAME.repository, "v1")) == folder
    assert whole_folder(HubName(NAME.repository, "b" * 40)) == folder


def test_token_is_sent(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    whole_folder(NAME)
    assert {one.token for one in hub.log} == {"Bearer hf_secret"}


def test_token_is_not_sent_to_the_host_that_has_the_weights(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    linked = {"X-Linked-Etag": f'"{sha256(WEIGHTS)}"', "X-Linked-Size": str(len(WEIGHTS)), "X-Repo-Commit": "a" * 40}
    with mirror() as other:
        other.models = hub.models
        hub.refuse = lambda path: (
            (302, linked | {"Location": other.url + path}) if path.endswith("/model.safetensors") else None
        )
        assert (whole_folder(NAME) / "model.safetensors").read_bytes() == WEIGHTS
        assert [one.token for one in other.asked("model.safetensors")] == [None]


def test_existing_folder_takes_precedence_over_a_hub_name(hub, tmp_path):
    shutil.copytree(EMBEDDED_FOLDER, tmp_path / NAME.repository)
    assert named(Path(NAME.repository)) == Path(NAME.repository)
    assert run(["inspect", NAME.repository]) == 0
    assert effective({"model": NAME.repository}, {}, None).config.model == Path(NAME.repository)
    assert hub.log == []


def test_embedded_model_has_a_name(hub, capsys):
    assert run(["inspect", EMBEDDED_FOLDER.name]) == 0
    assert effective({"model": EMBEDDED_FOLDER.name}, {}, None).config.model == EMBEDDED_FOLDER
    assert hub.log == []


@pytest.mark.parametrize("command", ["inspect", "profiles"])
def test_commands_that_need_only_sizes_download_only_the_config(hub, capsys, command):
    assert run([command, str(NAME)]) == 0
    printed = capsys.readouterr()
    assert {one.path.rpartition("/")[2] for one in hub.log if "/resolve/" in one.path} == {"config.json"}
    assert "config.json of commit aaaaaaaaaaaa is downloaded" in printed.err
    assert str(NAME) in printed.out or command == "inspect"


def test_setting_may_be_a_name_in_flags_environment_and_file(hub, tmp_path):
    file = tmp_path / "etc" / "some.toml"
    file.parent.mkdir()
    file.write_text('model = "some-org/some-model@v1"')
    wanted = HubName("some-org/some-model", "v1")
    for given in ({"model": str(wanted)}, {}, None), ({}, {"HEADWATER_MODEL": str(wanted)}, None), ({}, {}, file):
        settings = effective(*given)
        assert settings.config.model == wanted
        assert 'model = "some-org/some-model@v1"  # ' in as_toml(settings)
    shutil.copytree(EMBEDDED_FOLDER, file.parent / "some-org" / "some-model@v1")
    assert effective({}, {}, file).config.model == file.parent / "some-org" / "some-model@v1"
    assert hub.log == []


GATED = {"X-Error-Code": "GatedRepo"}
BAD_TOKEN = {"X-Error-Message": "Invalid credentials in Authorization header"}
UNKNOWN = "no folder some-org/some-model, and no such model on {url}: check the spelling; a private model needs HF_T"


@pytest.mark.parametrize(
    ("below", "answer", "message"),
    [
        ("/api/", (401, {}), UNKNOWN),
        ("/api/", (404, {}), UNKNOWN),
        ("/api/", (404, {"X-Error-Code": "RepoNotFound"}), UNKNOWN),
        ("/api/", (404, {"X-Error-Code": "RevisionNotFound"}), "some-org/some-model has no revision 'main' on {url}"),
        ("/api/", (401, BAD_TOKEN), "{url} refuses the token (401): renew HF_TOKEN, or unset it"),
        ("/some-org/", (403, GATED), "is gated: accept its licence at {url}/some-org/some-model, and set HF_TOKEN"),
        ("/api/", (500, {}), "{url} answers 500 for some-org/some-model: try again later"),
        ("/api/", (200, {}), "{url} does not answer as a hub does: check HF_ENDPOINT and the proxy"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "inspect"])
def test_refusal_of_the_hub_is_one_line_that_helps(hub, capsys, command, below, answer, message):
    hub.refuse = lambda path: answer if path.startswith(below) else None
    assert message.format(url=hub.url) in refusal(capsys, command, str(NAME))


def test_model_that_became_gated_after_its_config_was_fetched_is_refused(hub, capsys):
    hub.refuse = lambda path: (403, GATED) if path.endswith(".safetensors") else None
    assert "is gated: accept its licence" in refusal(capsys, "fidelity", str(NAME))


def test_hub_that_cannot_be_reached_is_named(hub, capsys, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    line = refusal(capsys, "serve", str(NAME))
    assert "http://127.0.0.1:9 cannot be reached (" in line
    assert line.endswith("): give a folder, or set HF_ENDPOINT to a mirror")


def test_hub_library_may_have_another_http_client(monkeypatch):
    """huggingface_hub 2 has httpx2, whose errors are none of httpx."""
    client = types.ModuleType("another_client")
    client.HTTPError = type("HTTPError", (Exception,), {"__module__": client.__name__})
    session = type("Client", (), {"__module__": f"{client.__name__}._client"})
    monkeypatch.setitem(sys.modules, client.__name__, client)
    monkeypatch.setattr("huggingface_hub.utils.get_session", session)
    with pytest.raises(DownloadError, match="cannot be reached"), explained(NAME):
        raise client.HTTPError("no route")


def test_without_a_network_and_without_the_model_the_cache_is_named(hub, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/some/cache")
    line = refusal(capsys, "serve", str(NAME))
    assert f"{NAME} is not complete in /some/cache, and HF_HUB_OFFLINE is set: unset it or give a folder" in line


def test_model_without_safetensors_is_refused_with_the_weights_that_it_has(hub, capsys):
    del hub.models[NAME.repository].files["model.safetensors"]
    line = refusal(capsys, "fidelity", str(NAME))
    assert "has no model.safetensors, but pytorch_model.bin, consolidated.safetensors and 3 more: only" in line
    assert hub.asked("pytorch_model.bin") == []
    hub.add(NAME.repository, {"README.md": b""})
    assert "has no model.safetensors, and no other weights: only" in refusal(capsys, "fidelity", str(NAME))
    assert "has no config.json: it is not a model in Hugging Face format" in refusal(capsys, "inspect", str(NAME))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_model_without_a_needed_file_is_refused_before_its_weights(hub, capsys, missing):
    del hub.models[NAME.repository].files[missing]
    assert f"some-org/some-model has no {missing}" in refusal(capsys, "fidelity", str(NAME))
    assert hub.asked("model.safetensors") == []


def test_tiktoken_model_is_downloaded_if_its_class_is_known(hub, capsys):
    files = hub.models[NAME.repository].files
    del files["tokenizer.json"]
    files["tiktoken.model"] = b"IQ== 0\n"
    assert "tiktoken.model of class None, not TikTokenTokenizer" in refusal(capsys, "fidelity", str(NAME))
    assert hub.asked("model.safetensors") == []
    files["tokenizer_config.json"] = b'{"tokenizer_class": "TikTokenTokenizer"}'
    hub.models[NAME.repository].revisions["main"] = "b" * 40
    assert (whole_folder(NAME) / "tiktoken.model").read_bytes() == b"IQ== 0\n"
    assert cached(NAME) is not None


@pytest.mark.parametrize("command", ["serve", "inspect", "fidelity"])
def test_unsupported_architecture_is_refused_before_its_weights_are_downloaded(hub, capsys, command):
    hub.models[NAME.repository].files["config.json"] = json.dumps(json.loads(CONFIG) | {"model_type": "gpt2"}).encode()
    assert run([command, str(NAME)]) == 2
    assert f"{NAME}: config.json: model_type 'gpt2' is not one of " in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="gpt2"):
        whole_folder(NAME)
    assert hub.asked("model.safetensors") == []


def test_blocks_of_bitsandbytes_that_cross_rows_are_refused_before_weights(hub, capsys):
    described = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    name, layer = "model.layers.0.mlp.down_proj.weight", json.loads(CONFIG)
    rows = layer["hidden_size"], layer["intermediate_size"]
    file = save({f"{name}.absmax": torch.zeros(rows[0] // 2), name: torch.zeros(LONG, dtype=torch.uint8)})
    changed = {"config.json": json.dumps(layer | described).encode(), "model.safetensors": file}
    hub.models[NAME.repository].files |= changed
    error = f"{name}: bitsandbytes has blocks of {2 * rows[1]} weights, which cross rows of {rows[1]}; take"
    assert error in refusal(capsys, "fidelity", str(NAME))
    assert {asked.status for asked in hub.asked("model.safetensors")} == {206}


def test_unsupported_format_of_modelopt_is_refused_before_weights(hub, capsys):
    described = {"quantization": {"quant_algo": "NVFP4_AWQ"}}
    hub.models[NAME.repository].files["hf_quant_config.json"] = json.dumps(described).encode()
    assert "ModelOpt's quant_algo 'NVFP4_AWQ' is not read" in refusal(capsys, "inspect", str(NAME))
    assert hub.asked("model.safetensors") == []


def test_hash_that_is_none_names_no_file_in_the_cache(hub, monkeypatch, tmp_path):
    monkeypatch.setattr("tests.hub_mirror.sha256", lambda content: "../../../outside")
    with pytest.raises(DownloadError, match="an invalid hash of some-org/some-model"):
        whole_folder(NAME)
    assert not list(tmp_path.rglob("outside*"))


def test_full_disk_is_refused_with_both_numbers_before_weights(hub, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 4_321)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage)
    line = refusal(capsys, "fidelity", str(NAME))
    needed = sum(map(len, FILES.values())) - len(CONFIG)
    assert f"needs {needed:,} bytes, {constants.HF_HUB_CACHE} has 4,321 free: make room, or set HF_HOME" in line
    assert hub.asked("model.safetensors") == []
