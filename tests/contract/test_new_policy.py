"""A new policy is one file and one line: server, lab and contract suites take it from the table."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest
from typer.testing import CliRunner

from headwater.cache import eviction, placement
from headwater.cache.eviction import EVICTION
from headwater.cache.placement import PLACEMENT
from headwater.cache.spelling import classes
from headwater.cli import commands
from headwater.cli.settings import effective
from tests.cache.toy import example
from tests.contract import test_eviction as contract

FIFO = """'''FIFO: the oldest node's checkpoint goes.'''

from headwater.cache.eviction.base.ranked import Ranked


class Fifo(Ranked):
    '''Lowest serial goes.'''

    def __init__(self, layout):
        super().__init__(lambda node: (node.serial,))
"""
MIDDLE = """'''A checkpoint in the middle of the prompt.'''

from headwater.cache.placement.base import Placed, Placement


class Middle(Placement):
    '''length / 2, floored to the grid.'''

    def place(self, query):
        return Placed(query.fresh((query.length // 2,)))
"""


def add(package: ModuleType, table: dict[str, object], name: str, text: str, folder: Path) -> None:
    (folder / f"{name}.py").write_text(text)
    package.__path__.append(str(folder))
    table.update(classes(package.__name__, {name: name.title()}))  # the table's line


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for package, table in ((eviction, EVICTION), (placement, PLACEMENT)):
        monkeypatch.setattr(package, "__path__", list(package.__path__))
        for name in table:
            monkeypatch.setitem(table, name, table[name])
    add(eviction, EVICTION, "fifo", FIFO, tmp_path)
    add(placement, PLACEMENT, "middle", MIDDLE, tmp_path)
    yield
    del EVICTION["fifo"], PLACEMENT["middle"]


@pytest.mark.usefixtures("added")
def test_server_accepts_a_new_policy() -> None:
    config = effective({"eviction": "fifo", "placement": "middle"}, {}, None).config
    assert (config.eviction, config.placement) == ("fifo", "middle")


@pytest.mark.usefixtures("added")
def test_lab_accepts_a_new_policy(tmp_path: Path) -> None:
    lines = [
        json.dumps({"t": at, "session": str(at), "input": [*range(at % 5 * 1000, at % 5 * 1000 + 300)]})
        for at in range(20)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    command = ["replay", str(tmp_path / "trace.jsonl"), "--memory", "200MB", "--jobs", "1"]
    out = tmp_path / "out.json"
    chosen = ["--eviction", "lru,fifo", "--placement", "middle", "--json", str(out)]
    done = CliRunner().invoke(commands, [*command, *chosen])
    assert done.exit_code == 0, done.output
    assert [row["eviction"] for row in json.loads(out.read_text())["rows"]] == ["lru", "fifo"]


@pytest.mark.usefixtures("added")
def test_new_policy_passes_the_contract_suite() -> None:
    ran = 0
    for name, test in vars(contract).items():
        given = inspect.signature(test).parameters if name.startswith("test_") else {}
        if "policy" in given and set(given) <= {"policy", "fraction"} and "hits" not in name:
            test(**{"policy": "fifo", "fraction": None} if "fraction" in given else {"policy": "fifo"})
            ran += 1
    assert ran >= 8


@pytest.mark.parametrize(("package", "table"), [(eviction, EVICTION), (placement, PLACEMENT)])
def test_folder_of_policies_holds_only_policies_and_their_base(package: ModuleType, table: dict[str, type]) -> None:
    files = {module.name for module in iter_modules(package.__path__)} - {"base"}
    assert files == set(table)
    for name, policy in table.items():
        assert policy.__module__ == f"{package.__name__}.{name}"
        assert policy.__doc__, f"{name} has no formula"


def test_examples_spell_required_options_with_1() -> None:
    assert example("path_cap", EVICTION["path_cap"]) == "path_cap(1)"
    assert example("marconi", EVICTION["marconi"]) == "marconi"
