"""The served model and the version in Ollama's API, as clients read them before they send a prompt."""

from datetime import datetime

import pytest

from headwater.server.routes.ollama import short
from tests.server import templates
from tests.server.client import send, send_all
from tests.server.templates import HERMES


def test_model_is_listed_and_described(engine):
    engine.chat_template = HERMES
    engine.generation_defaults = {"temperature": 0.6, "repetition_penalty": 1.1, "do_sample": True}
    shown = ("POST", "/api/show", {"json": {"model": "fake"}})
    tags, ps, show = send_all(engine, [("GET", "/api/tags", {}), ("GET", "/api/ps", {}), shown])
    (listed,), (running,), show = tags.json()["models"], ps.json()["models"], show.json()
    assert (listed["name"], listed["model"], listed["size"]) == ("fake", "fake", 2_400_000)
    assert len(bytes.fromhex(listed["digest"])) == 32
    assert listed["details"] == show["details"]
    assert show["details"] == {
        "parent_model": "",
        "format": "safetensors",
        "family": "fake_hybrid",
        "families": ["fake_hybrid"],
        "parameter_size": "1.2M",
        "quantization_level": "BF16",
    }
    assert listed["modified_at"] == show["modified_at"]
    assert datetime.fromisoformat(listed["modified_at"]).utcoffset() is not None
    assert listed.items() <= running.items()
    assert (running["size_vram"], running["context_length"]) == (0, 4096)
    assert datetime.fromisoformat(running["expires_at"]) > datetime.fromisoformat(listed["modified_at"])
    assert show["model_info"]["general.architecture"] == "fake_hybrid"
    assert show["model_info"]["general.parameter_count"] == 1_200_000
    assert show["model_info"]["fake_hybrid.context_length"] == 4096
    assert show["capabilities"] == ["completion", "tools", "thinking"]
    assert show["template"] == HERMES
    options = dict(line.split() for line in show["parameters"].splitlines())
    assert options == {"num_ctx": "4096", "temperature": "0.6", "repeat_penalty": "1.1"}


@pytest.mark.parametrize(
    ("template", "capabilities"),
    [(None, ["completion"]), ("{{ messages }}", ["completion"]), (templates.SILENT, ["completion", "thinking"])],
)
def test_capabilities_are_derived_from_marks_in_the_template(engine, template, capabilities):
    engine.chat_template = template
    assert send(engine, "POST", "/api/show", json={"model": "fake"}).json()["capabilities"] == capabilities


def test_number_of_weights_is_short():
    assert [short(n) for n in (512, 26_200, 1_200_000, 4_020_000_000)] == ["512", "26.2K", "1.2M", "4.0B"]


def test_version_is_one_of_ollamas_that_clients_compare(engine):
    found = send(engine, "GET", "/api/version").json()
    assert tuple(map(int, found["version"].split("."))) > (0, 6, 4)
    assert found["headwater"] == send(engine, "GET", "/version").json()["version"]


@pytest.mark.parametrize("path", ["/", "/api/tags", "/api/version"])
def test_head_is_answered_as_get_is(engine, path):
    get, head = send_all(engine, [("GET", path, {}), ("HEAD", path, {})])
    assert (get.status_code, head.status_code) == (200, 200)
    assert head.headers["content-type"] == get.headers["content-type"]
