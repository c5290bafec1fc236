"""Names that users and their programs depend on, held to the checked-in list `public_names.json`.

A name that is removed or changed breaks scripts, dashboards and readers, so a change of the list needs a line in
CHANGELOG.md. Settings and options may be added without one: the manual's table lists them.
PUBLIC_NAMES=write pytest tests/cli/test_public_names.py writes the list from the code.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families

from headwater.cli import commands, run
from headwater.config import SETTINGS
from tests.evaluate.items import fields, tool_item

LIST = Path(__file__).with_name("public_names.json")
# objects whose keys are data: policies, outcomes, reasons and the like
FREE = {
    "misses_by_reason", "outcomes", "errors", "reasons", "tenants", "columns", "comparisons", "perplexity", "failed",
    "arguments",
}  # fmt: skip
FREE_OBJECTS = {"/health", "/v1/models", "/version", "machine", "config"}  # of others: pages, packages, checkpoints


def names(value: Any, path: str = "") -> set[str]:
    """The fields of a JSON value as dotted paths: `rows[].ttft`; `*` stands for keys that are data."""
    if isinstance(value, list):
        return {f"{path}[]"}.union(*(names(entry, f"{path}[]") for entry in value))
    if not isinstance(value, dict):
        return {f"{path} {value}" if path.endswith(".columns[]") else path}  # a table's columns are names
    key_is_data = path.rpartition(".")[2] in FREE
    below = (
        names(entry, ".".join(filter(None, (path, "*" if key_is_data else key))))
        for key, entry in value.items()
        if key not in FREE_OBJECTS
    )
    return {path}.union(*below) - {""}


def options_of(command: Any) -> dict[str, Any]:
    """Arguments and options of a command with their defaults, as they are typed."""
    return {
        "/".join((*one.opts, *one.secondary_opts)): str(one.default.name)
        if isinstance(one.default, Path)
        else one.default
        for one in command.params
    }


def all_commands() -> dict[str, dict[str, Any]]:
    found = {"headwater": typer.main.get_command(commands)}
    for name, command in [*found["headwater"].commands.items()]:
        inner = getattr(command, "commands", None) or {}
        found |= {f"headwater {name} {part}": one for part, one in inner.items()} or {f"headwater {name}": command}
    return {name: options_of(command) for name, command in sorted(found.items())}


def all_settings() -> dict[str, str]:
    """Return flag, variable, default and choices of each setting by its key in files."""
    return {
        one.name: " ".join((one.flag, one.variable, one.show(one.default) or "none", *one.choices)) for one in SETTINGS
    }


def metrics(page: str) -> Iterator[str]:
    """Yield each series with its type and labels: `headwater_evictions_total counter {kind}`."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue  # the client library's own
            labels = ", ".join(sorted(sample.labels))
            yield f"{sample.name} {family.type} {{{labels}}}" if labels else f"{sample.name} {family.type}"


@pytest.fixture(scope="module")
def files(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON of `bench`, `eval` and `replay`, after which the server has met every kind of request."""
    folder = tmp_path_factory.mktemp("json")
    messages = [
        {"role": "system", "content": "D1 is long enough. " * 30 + "D2 is another one. " * 30},
        {"role": "user", "content": "Who?"},
    ]
    documents = ["D1 is long enough. " * 30, "D2 is another one. " * 30]
    tool = {"tools": list(tool_item().tools), "call": {"name": "look_up", "arguments": {"code": "K1"}}}
    lines = [
        fields(messages=messages, documents=documents),
        fields(messages=messages, documents=documents, kind="tool", group=1, answers=[], **tool),
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "text").write_text("The quiet river flows under the bridge. " * 5)
    small = ("--prefix-tokens", "200", "--prompt-tokens", "20", "--output-tokens", "4", "--requests", "4")
    asked = ("eval", "--url", url, "--max-tokens", "3", "--tasks", folder / "tasks.jsonl")
    for name, line in {
        "bench": ("bench", "serve", "--url", url, *small),
        "eval": (*asked, "--segments"),
        "eval_paired": (*asked, "--paired"),
        "eval_text": ("eval", "--url", url, "--against", url, "--text", folder / "text"),
        "replay": ("replay", "rag(zipf=1)", "--limit", "8", "--jobs", "1", "--serve", "h100"),
    }.items():
        assert run([*map(str, line), "--json", str(folder / f"{name}.json")]) == 0, name
    return folder


def page(url: str, path: str) -> httpx.Response:
    return httpx.get(f"{url}{path}", timeout=20).raise_for_status()


def json_names(*files: Path) -> set[str]:
    return set().union(*(names(json.loads(file.read_text())) for file in files))


def recorded_names(file: Path) -> set[str]:
    """Return the fields of a recording's head and lines, once the server has written them."""
    deadline = time.monotonic() + 20
    while (lines := file.read_text().splitlines())[1:] == [] and time.monotonic() < deadline:
        time.sleep(0.1)
    head, *rest = (json.loads(line) for line in lines)
    return names(head, "head") | set().union(*(names(line, "line") for line in rest))


PARTS: dict[str, Callable[[str, Path, Path], Any]] = {
    "commands": lambda url, folder, recorded: all_commands(),
    "settings": lambda url, folder, recorded: all_settings(),
    "metrics": lambda url, folder, recorded: sorted(set(metrics(page(url, "/metrics").text))),
    "/health": lambda url, folder, recorded: sorted(names(page(url, "/health").json())),
    "/cache": lambda url, folder, recorded: sorted(names(page(url, "/cache").json())),
    "replay --json": lambda url, folder, recorded: sorted(json_names(folder / "replay.json")),
    "bench serve --json": lambda url, folder, recorded: sorted(json_names(folder / "bench.json")),
    "eval --json": lambda url, folder, recorded: sorted(json_names(*folder.glob("eval*.json"))),
    "recording": lambda url, folder, recorded: sorted(recorded_names(recorded)),
}


def without_additions(found: Any, known: Any) -> Any:
    """Return the settings, commands and options (keys of objects) that the list knows too; all of anything else."""
    if not isinstance(found, dict) or not isinstance(known, dict):
        return found
    return {key: without_additions(value, known[key]) for key, value in found.items() if key in known}


@pytest.mark.parametrize("part", PARTS)
def test_public_names_are_those_of_the_list(part: str, url: str, files: Path, recorded: Path) -> None:
    found = json.loads(json.dumps(PARTS[part](url, files, recorded)))  # tuples as lists
    known = json.loads(LIST.read_text()) if LIST.is_file() else {}
    if os.environ.get("PUBLIC_NAMES") == "write":
        LIST.write_text(json.dumps({**known, part: found}, indent=1, ensure_ascii=False) + "\n")
    else:
        found = without_additions(found, known[part])
        assert found == known[part]
        assert json.dumps(found) == json.dumps(known[part]), "the same names in another order"


def test_list_accepts_added_setting_but_not_changed_or_removed_one() -> None:
    known = {"memory": "--memory 4GB", "port": "--port 8000"}
    assert without_additions({**known, "new": "--new 1"}, known) == known
    assert without_additions({"memory": "--memory 4GB"}, known) != known
    assert without_additions({**known, "port": "--port 80"}, known) != known
