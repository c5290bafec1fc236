"""Settings are checked once, and an error names the setting and what it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.config import ServeConfig, parse_bytes, user_cache_dir
from headwater.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GB", 4 * 10**9),
        ("4GiB", 4 * 2**30),
        ("1.5 mb", 1_500_000),
        ("512KiB", 512 * 1024),
        ("2TB", 2 * 10**12),
        ("65536", 65536),
        ("7B", 7),
    ],
)
def test_bytes_with_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "4XB", "GB", "-4GB", "4 G B", "1e9"])
def test_other_sizes_are_refused_as_they_were_written(text):
    with pytest.raises(ConfigError, match="4GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"model": Path("/nonexistent")}, "/nonexistent"),
        ({"device": "tpu"}, "'tpu'.*cpu, cuda"),
        ({"dtype": "int8"}, "'int8'.*bfloat16"),
        ({"page_size": 96}, "96.*64"),
        ({"page_size": 0}, "0.*64"),
        ({"memory": 0}, "memory is 0"),
        ({"max_running": 0}, "max_running is 0.*1"),
        ({"max_tokens_per_step": 63}, "63.*64"),
        ({"page_size": 128, "max_tokens_per_step": 64}, "64.*128"),
        ({"threads": 0}, "threads is 0.*1"),
        ({"port": 65536}, "65536"),
        ({"pool": "three"}, "'three'"),
        ({"pool": "split"}, "state_fraction must be given"),
        ({"pool": "split", "state_fraction": 1.0}, "1.0"),
        ({"state_fraction": 0.5}, "0.5.*'unified'"),
        ({"decode_reuse": "some"}, "'some'"),
    ],
)
def test_bad_settings_are_named_with_their_values(setting, message):
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**setting)


def test_a_split_pool_needs_a_fraction_between_0_and_1():
    assert ServeConfig(pool="split", state_fraction=0.5).state_fraction == 0.5


def test_what_is_made_for_a_user_is_kept_in_the_users_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/tmp/somewhere")
    assert user_cache_dir() == Path("/var/tmp/somewhere/headwater")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert ServeConfig().cache_dir == Path("/home/someone/.cache/headwater")
