"""Models by their names on a hub: names, and a server that downloads one."""

import json
from pathlib import Path

import httpx
import pytest

from headwater.hub_name import HubName, name_of
from headwater.models.files import embedded
from tests.forked import PATIENCE, Forked, address, serving
from tests.hub_mirror import mirror

NAME = "some-org/some-model"


@pytest.fixture
def environment(tmp_path):
    """Variables of a process whose cache is empty."""
    return {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}


def asked(said):
    """Ask a server for its models and for a completion; returns the name that it has in each."""
    with httpx.Client(base_url=address(said), timeout=PATIENCE) as client:
        (model,) = client.get("/models").json()["data"]
        answer = client.post("/completions", json={"prompt": "abc", "max_tokens": 4}).json()
        assert answer["usage"]["completion_tokens"] > 0
        root = address(said).removesuffix("v1")
        health = client.get(f"{root}health").json()
        (tag,) = client.get(f"{root}api/tags").json()["models"]
    return {model["id"], answer["model"], health["model"], tag["name"]}


def stopped(process):
    """Stop a server; returns its log."""
    process.terminate()
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, log
    return log


def test_model_is_served_by_its_name_and_again_without_a_hub(environment, tmp_path):
    recording = tmp_path / "my.trace"
    with mirror() as hub:
        hub.add(NAME, {path.name: path.read_bytes() for path in embedded().iterdir()})
        online = environment | {"HF_ENDPOINT": hub.url}
        with serving(NAME, "--port", "0", "--record", str(recording), **online) as (process, said):
            assert said[0].endswith(f": loading {NAME}\n")
            assert said[-3].startswith("Headwater ")
            assert f" serves {NAME} on " in said[-3]
            assert asked(said) == {NAME}
            log = stopped(process)
        assert f"{NAME}, commit aaaaaaaaaaaa: 5 files, " in log
        assert "snapshots" not in log + "".join(said)
        assert "HTTP Request" not in log
        head = json.loads(recording.read_text().splitlines()[0])
        assert (head["model"], head["config"]["model_type"]) == (NAME, "qwen3_5_text")
        assert not hub.asked("README.md")
    for name, flags in ((NAME, ()), ("small", ("--model-name", "small"))):
        with serving(NAME, "--port", "0", *flags, **online, HF_HUB_OFFLINE="1") as (process, said):
            assert asked(said) == {name}
            assert "files, " not in stopped(process)


@pytest.mark.full
def test_occupied_port_is_refused_before_weights_are_downloaded(environment):
    with mirror() as hub:
        hub.add(NAME, {path.name: path.read_bytes() for path in embedded().iterdir()})
        port = hub.url.rpartition(":")[2]
        with Forked("serve", "--memory", "200MB", NAME, "--port", port, **environment, HF_ENDPOINT=hub.url) as process:
            _, log = process.communicate(timeout=PATIENCE)
        assert (process.returncode, hub.asked("model.safetensors")) == (2, [])
        assert f"127.0.0.1:{port}" in log


@pytest.mark.full
def test_terminated_download_is_continued_by_the_next_start(environment):
    weights = (embedded() / "model.safetensors").read_bytes()
    with mirror() as hub:
        hub.add(NAME, {path.name: path.read_bytes() for path in embedded().iterdir()})
        hub.pause = 1_000_000
        with Forked("serve", "--memory", "200MB", NAME, "--port", "0", **environment, HF_ENDPOINT=hub.url) as process:
            assert hub.paused.wait(PATIENCE)
            process.terminate()
            hub.resumed.set()
            _, log = process.communicate(timeout=PATIENCE)
        assert (process.returncode, "Traceback" in log) == (0, False), log
        with serving(NAME, "--port", "0", **environment, HF_ENDPOINT=hub.url) as (process, said):
            assert asked(said) == {NAME}
        first, second = hub.asked("model.safetensors")
        assert 0 == first.first < second.first <= len(weights)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3.5-0.8B", HubName("Qwen/Qwen3.5-0.8B")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name@main", HubName("org/name")),
    ],
)
def test_name_has_an_organisation_and_perhaps_a_revision(text: str, name: HubName) -> None:
    assert HubName.parse(text) == name
    assert HubName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "name",
        "/org/name",
        "../name",
        "./name",
        "org/../name",
        "a/b/c",
        "org/",
        "org/na me",
        "org--x/name",
        "~/name",
        "",
    ],
)
def test_paths_are_not_parsed_as_hub_names(text: str) -> None:
    assert HubName.parse(text) is None


@pytest.mark.parametrize("revision", ["", "/etc/passwd", "../../x", "a b"])
def test_revision_leaves_no_folder_of_the_cache(revision: str) -> None:
    assert HubName.parse(f"org/name@{revision}") is None


def test_model_name_is_the_hubs_for_cached_folders_only() -> None:
    assert name_of(Path("/cache/hub/models--org--some-name_1.5/snapshots/0123abc")) == "org/some-name_1.5"
    assert name_of(Path("/models/some-name")) == "some-name"
    assert HubName.of_folder(Path("/cache/hub/models--org--name")) is None
