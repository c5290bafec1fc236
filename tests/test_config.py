"""Settings are checked once, and an error names the setting and what it was."""

from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path

import pytest

from headwater import config
from headwater.cli import settings
from headwater.cli.serve import with_options
from headwater.config import LOG_FORMATS, REASONING_FORMATS, SETTINGS, TOOL_FORMATS, ServeConfig
from headwater.errors import ConfigError
from headwater.server.answer import formats
from headwater.server.observe import logs
from headwater.setting import COUNT, parse_bytes, setting, settings_of, show_bytes
from pages import settings as settings_page


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
def test_unknown_sizes_are_refused_as_written(text):
    with pytest.raises(ConfigError, match="4GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("size", [1, 999, 1000, 1024, 65536, 4 * 10**9, 4 * 2**30, 1_500_000, 2 * 10**12])
def test_shown_size_reads_as_the_same_size(size):
    assert parse_bytes(show_bytes(size)) == size


def test_a_size_is_shown_short():
    assert (show_bytes(4 * 10**9), show_bytes(2**30), show_bytes(1_500_000)) == ("4GB", "1GiB", "1500KB")


@pytest.mark.parametrize(
    ("given", "message"),
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
        ({"segment_share": 1.5}, "1.5.*0 to 1"),
        ({"segment_eviction": "fifo"}, "fifo.*lru, cost"),
        ({"decode_reuse": "some"}, "'some'"),
        ({"max_waiting": 0}, "max_waiting is 0.*1"),
        ({"request_timeout": 0.0}, "request_timeout is 0.*more than 0"),
        ({"request_timeout": float("nan")}, "request_timeout is nan"),
        ({"drain": -1.0}, "drain is -1.*0"),
        ({"tool_format": "yaml"}, "'yaml'.*hermes"),
        ({"reasoning_format": "aloud"}, "'aloud'.*think"),
        ({"log_format": "xml"}, "'xml'.*text, json"),
        ({"cors": ("https://chat.example/",)}, "https://chat.example/.*origin"),
        ({"cors": ("chat.example",)}, "'chat.example'"),
        ({"api_key": " "}, "api_key is empty"),
        ({"api_key": "a", "api_key_file": Path("/b")}, "api_key_file is '/b'.*api_key"),
        ({"api_key_file": Path("/nonexistent")}, "api_key_file is '/nonexistent'.*cannot be read"),
        ({"api_key_file": Path("/dev/null")}, "api_key_file is '/dev/null'.*empty"),
        ({"tls_key": Path(__file__)}, "tls_key.*tls_cert is not given"),
        ({"tls_cert": Path(__file__)}, "tls_cert.*tls_key is not given"),
        ({"tls_cert": Path(__file__), "tls_key": Path("/nonexistent")}, "tls_key is '/nonexistent'.*not a file"),
        ({"tls_cert": Path(__file__), "tls_key": Path(__file__), "uds": Path("s")}, "tls_key.*uds is 's'"),
    ],
)
def test_bad_settings_are_named_with_their_values(given, message):
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**given)


@pytest.mark.parametrize("given", [{"cache": False}, {"decode_reuse": "raw"}])
def test_tiers_need_exact_content_on_any_device(given):
    assert ServeConfig(tier=("memory,size=20GB",), device="cuda").tier == ("memory,size=20GB",)
    with pytest.raises(ConfigError, match="tier is"):
        ServeConfig(tier=("memory,size=20GB",), **given)


def test_api_key_is_given_or_read_from_its_file(tmp_path):
    (tmp_path / "key").write_text(" sesame\n")
    assert ServeConfig().accepted_keys() == ()
    assert [one.secret for one in ServeConfig(api_key="open").accepted_keys()] == [b"open"]
    assert [one.secret for one in ServeConfig(api_key_file=tmp_path / "key").accepted_keys()] == [b"sesame"]


def test_printed_settings_have_no_secret():
    assert "sesame" not in repr(ServeConfig(api_key="sesame"))


@dataclass(frozen=True, slots=True)
class MoreConfig(ServeConfig):
    haste: int = setting(3, COUNT, "Scheduling", "Haste of the server.", least=1)  # the one line


def test_one_line_declares_a_setting_with_its_sources_and_page(monkeypatch, tmp_path):
    more = settings_of(fields(MoreConfig))
    for module in (settings, config, settings_page):
        monkeypatch.setattr(module, "SETTINGS", more)
    monkeypatch.setattr(settings, "NAMED", {one.name: one for one in more})
    monkeypatch.setattr(settings, "ServeConfig", MoreConfig)
    (tmp_path / "file.toml").write_text("haste = 4\n")
    variable = {"HEADWATER_HASTE": "5"}
    assert settings.effective({}, {}, None).config.haste == 3
    assert settings.effective({}, {}, tmp_path / "file.toml").config.haste == 4
    assert settings.effective({}, variable, tmp_path / "file.toml").config.haste == 5
    assert settings.effective({"haste": "6"}, variable, None).config.haste == 6
    assert "haste = 3" in settings.as_toml(settings.effective({}, {}, None))
    assert "| `haste` | `3` | Haste of the server. |" in settings_page.page()
    assert "haste" in signature(with_options(lambda **flags: None, more)).parameters
    with pytest.raises(ConfigError, match=r"haste is 0 \(from HEADWATER_HASTE\), must be at least 1"):
        settings.effective({}, {"HEADWATER_HASTE": "0"}, None)


@pytest.mark.parametrize("one", SETTINGS, ids=lambda one: one.name)
def test_names_of_a_setting_come_from_its_line(one):
    assert one.flag == "--" + one.name.replace("_", "-")
    assert one.variable == "HEADWATER_" + one.name.upper()
    assert settings.NAMED[one.name] is one


def test_every_default_can_be_written_and_read_again():
    for one in SETTINGS:
        if one.default is not None:
            assert one.read(one.show(one.default)) == one.default, one.name


def test_choices_of_formats_are_the_existing_formats():
    assert {"auto", "none", *formats.TOOLS} == set(TOOL_FORMATS)
    assert {"auto", "none", *formats.REASONING} == set(REASONING_FORMATS)
    assert set(logs.FORMATTERS) == set(LOG_FORMATS)


def test_home_of_an_unknown_user_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"model is '~nobody-at-all/x', must be a path"):
        settings.NAMED["model"].read("~nobody-at-all/x")
