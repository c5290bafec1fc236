"""From settings to a publisher: addresses, key, token ids, a missing package."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.cli.serve import kv_events
from headwater.cluster.messages import Digests
from headwater.cluster.picture import Follower
from headwater.cluster.publisher import Publishing
from headwater.config import ServeConfig
from headwater.errors import ConfigError
from tests.cache.toy import PAGE, words
from tests.cluster.rig import logged
from tests.cluster.test_publisher import ANY, settled


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    key = tmp_path / "key"
    return {"kv_events": True, "kv_events_endpoint": ANY, "kv_events_replay_endpoint": ANY, "kv_events_key": key}


@pytest.fixture
def publishing(settings: dict[str, Any]) -> Iterator[Publishing]:
    one = Publishing(ServeConfig(**settings, kv_events_tokens=True))
    yield one
    one.close()


def test_started_publisher_sends_the_cache_and_then_each_step(publishing: Publishing) -> None:
    toy = logged()
    prompt = words(1, 3 * PAGE + 1)
    toy.serve(prompt)
    stepped = publishing.start(toy.cache)
    settled(publishing._publisher)  # type: ignore[arg-type]
    with Follower(*publishing.addresses, "kv-events") as follower:
        toy.serve(words(2, 2 * PAGE + 1))
        stepped()
        follower.follow(1.5)
        key = bytes.fromhex(publishing._config.kv_events_key.read_text())  # type: ignore[union-attr]
        blocks = Digests(key, toy.layout.unit_bytes).prompt(prompt)
        assert follower.picture.resumable(blocks, len(prompt)) == 3 * PAGE
        others = Digests(bytes(32), toy.layout.unit_bytes).prompt(prompt)
        assert follower.picture.resumable(others, len(prompt)) == 0, "with another key nothing is recognised"


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"kv_events_endpoint": "127.0.0.1"}, "kv_events_endpoint is '127.0.0.1', must be an address such as"),
        ({"kv_events_replay_endpoint": "tcp://x"}, "kv_events_replay_endpoint is 'tcp://x', must be an address"),
        ({"kv_events_endpoint": "http://a:1"}, "kv_events_endpoint is 'http://a:1', must be an address"),
        ({"cache": False}, "kv_events is on, but the cache is off"),
        ({"kv_events_key": Path("/proc/x/key")}, "kv_events_key is '/proc/x/key', but the key of KV events '/proc/x"),
        ({"kv_events_endpoint": "tcp://no-such-host.invalid:1"}, "kv_events_endpoint is 'tcp://no-such-host.invalid"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, Any], changed: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Publishing(ServeConfig(**settings | changed))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://*:5557", "tcp://[::1]:5557", "ipc:///tmp/events"])
def test_zeromq_addresses_are_accepted(address: str) -> None:
    assert ServeConfig(kv_events_endpoint=address).kv_events_endpoint == address


def test_other_addresses_than_loopback_are_warned_of(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    publishing = Publishing(ServeConfig(**settings | {"kv_events_endpoint": "tcp://0.0.0.0:*"}))
    with caplog.at_level(logging.WARNING):
        publishing.start(logged().cache)
    publishing.close()
    (line,) = caplog.messages
    assert line.startswith("KV events are readable by all who can connect to tcp://0.0.0.0:")


def test_without_kv_events_nothing_of_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of it would fail, and with `kv_events` on it does."""
    monkeypatch.setitem(sys.modules, "headwater.cluster", None)
    monkeypatch.delitem(sys.modules, "headwater.cluster.publisher", raising=False)
    engine = SimpleNamespace(stepped="as it was")
    with kv_events(ServeConfig()) as publish:
        publish(engine)  # type: ignore[arg-type]
    assert engine.stepped == "as it was"
    with pytest.raises(ModuleNotFoundError), kv_events(ServeConfig(kv_events=True)):
        pass
