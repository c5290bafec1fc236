"""`headwater cluster upgrade`: settings that it takes, models that it refuses, and what it prints."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.cli import cluster_upgrade
from headwater.cli.cluster import Commands
from headwater.cli.cluster_upgrade import UPGRADABLE_NAMES, given_values, seen_of, steps, upgraded
from headwater.cluster.cost import Role
from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.models.files import embedded

WORKERS = {Role.BOTH: 2}
ROLES = {Role.PREFILL: 1, Role.DECODE: 2}


@pytest.fixture(scope="module")
def seen() -> dict[str, str]:
    return seen_of(ServeConfig())


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A copy of the embedded model, with another name."""
    return Path(shutil.copytree(embedded(), tmp_path / "other"))


def test_upgrade_takes_settings_of_workers_from_all_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "some.toml").write_text("port = 9\nmemory = '3GB'\neviction = 'lru'")
    flags = {"model": Path("model"), "eviction": "seglen", "cache": None, "tier": []}
    environment = {"HEADWATER_PORT": "no number", "HEADWATER_SEGMENT_SHARE": "0.25"}
    values = given_values(flags, environment, tmp_path / "some.toml")
    given = {"model": tmp_path / "model", "eviction": "seglen", "segment_share": 0.25, "memory": 3 * 10**9}
    assert values == given
    with pytest.raises(ConfigError, match=r"memory is 'much' \(from HEADWATER_MEMORY\), must be a number"):
        given_values({}, {"HEADWATER_MEMORY": "much"}, None)


def test_settings_that_are_not_given_stay_and_the_served_name_does(seen: dict[str, str], other: Path) -> None:
    before = ServeConfig(memory=10**9, max_running=3, port=9000)
    new = upgraded(before, {"model": other, "eviction": "lru"}, seen, "headwater-tiny", WORKERS)
    kept = (new.memory, new.max_running, new.port)
    assert (new.model, new.model_name, new.eviction, *kept) == (other, "headwater-tiny", "lru", 10**9, 3, 9000)


def without_a_template(folder: Path) -> None:
    for name in ("chat_template.jinja", "chat_template.json"):
        (folder / name).unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def with_another_token(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] += "x"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(("change", "what"), [(without_a_template, "chat template"), (with_another_token, "tokenizer")])
def test_model_with_other_texts_is_refused(
    seen: dict[str, str], other: Path, change: Callable[[Path], None], what: str
) -> None:
    change(other)
    with pytest.raises(ConfigError, match=f"differs from the model that is served in: .*{what}.*start another cluster"):
        upgraded(ServeConfig(), {"model": other}, seen, "headwater-tiny", WORKERS)


@pytest.mark.parametrize(
    ("values", "roles", "message"),
    [
        ({"eviction": "best"}, WORKERS, "eviction is 'best'"),
        ({"model": Path("/nowhere")}, WORKERS, "which is not a folder with a config.json"),
        ({"cache": False}, ROLES, "prefill is 1, must be 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    seen: dict[str, str], values: dict[str, Any], roles: dict[Role, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        upgraded(ServeConfig(), values, seen, "headwater-tiny", roles)


def test_no_setting_of_routers_is_upgradable() -> None:
    assert not {
        "model_name",
        "page_size",
        "max_running",
        "max_waiting",
        "drain",
        "host",
        "threads",
        "speculation",
    } & set(UPGRADABLE_NAMES)


def shown(said: list[str], *, ended: bool = False, error: str = "", number: str = "1") -> dict[str, Any]:
    return {"upgrade": {"id": number, "said": said, "error": error, "ended": ended}, "refused": {}}


def test_steps_are_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_upgrade, "POLL_SECONDS", 0.0)
    earlier = shown(["another"], ended=True, number="0")
    states = iter([earlier, shown(["a"]), {}, shown(["a", "b"]), shown(["a", "b", "c"], ended=True)])
    assert [*steps(lambda: next(states), "1")] == ["a", "b", "c"]


def test_abandoned_refused_or_ignored_upgrade_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = steps(lambda: shown(["a"], ended=True, error="w2 could not start"), "1")
    assert next(given_up) == "a"
    with pytest.raises(ConfigError, match="w2 could not start"):
        next(given_up)
    with pytest.raises(ConfigError, match="done already"):
        next(steps(lambda: {"upgrade": None, "refused": {"1": "it is done already"}}, "1"))
    monkeypatch.setattr(cluster_upgrade, "ACCEPT_SECONDS", -1.0)
    with pytest.raises(ConfigError, match="did not begin"):
        next(steps(lambda: {"upgrade": None, "refused": {}}, "1"))


def test_after_a_command_that_fails_others_are_heard() -> None:
    done, ended = list[str](), threading.Event()

    def drain(name: str) -> None:
        if name == "w0":
            raise OSError("no such worker")
        done.append(name)
        ended.set()

    running = SimpleNamespace(config=ServeConfig(), wanted=WORKERS, upgrade=None, drain=drain)
    mailbox = SimpleNamespace(exchange=lambda state: [("drain", "w0"), ("drain", "w1")])
    Commands(mailbox, SimpleNamespace(state=dict), running, "headwater-tiny").follow(ended)
    assert done == ["w1"]
