"""Sources of settings, their order, and errors that name the source."""

import tomllib
from pathlib import Path

import pytest

from headwater.cli.settings import as_toml, effective, misspelt
from headwater.config import SETTINGS, ServeConfig
from headwater.errors import ConfigError
from headwater.setting import without_password


@pytest.fixture
def toml(tmp_path):
    """Write a file of settings; gives its path."""

    def write(text):
        path = tmp_path / "headwater.toml"
        path.write_text(text)
        return path

    return write


def test_without_anything_the_defaults_hold():
    settings = effective({}, {}, None)
    assert settings.config == ServeConfig()
    assert settings.origins == {}


def test_flag_overrides_environment_and_environment_overrides_file(toml):
    path = toml("page_size = 64\nmax_running = 1\nmax_waiting = 1\nthreads = 1")
    environment = {"HEADWATER_PAGE_SIZE": "128", "HEADWATER_MAX_RUNNING": "2", "HEADWATER_MAX_WAITING": "2"}
    settings = effective({"page_size": "192", "max_running": "3", "port": None}, environment, path)
    config = settings.config
    assert (config.page_size, config.max_running, config.max_waiting, config.threads) == (192, 3, 2, 1)
    assert settings.origins == {
        "page_size": "--page-size",
        "max_running": "--max-running",
        "max_waiting": "HEADWATER_MAX_WAITING",
        "threads": str(path),
    }


def test_overridden_values_are_not_parsed():
    settings = effective({"port": "80"}, {"HEADWATER_PORT": "tcp://10.0.0.1:8000"}, None)
    assert settings.config.port == 80


def test_every_kind_of_value_is_read_from_the_environment():
    environment = {
        "HEADWATER_MEMORY": "2GiB",
        "HEADWATER_CACHE": "off",
        "HEADWATER_CORS": "https://a.example, http://localhost:3000",
        "HEADWATER_DRAIN": "2.5",
        "HEADWATER_UDS": "/run/hw.sock",
        "HEADWATER_API_KEY": "sesame",
        "HEADWATER_THREADS": "",
    }
    config = effective({}, environment, None).config
    assert config == ServeConfig(
        memory=2 * 2**30,
        cache=False,
        cors=("https://a.example", "http://localhost:3000"),
        drain=2.5,
        uds=Path("/run/hw.sock"),
        api_key="sesame",
    )


def test_configuration_file_accepts_toml_values_and_flag_texts(toml, tmp_path):
    path = toml('memory = "2GiB"\npage-size = 128\ncache = false\ndrain = 2\ncors = ["https://a.example"]\nuds = "s"')
    config = effective({}, {}, path).config
    assert (config.memory, config.page_size, config.cache, config.drain) == (2 * 2**30, 128, False, 2)
    assert config.cors == ("https://a.example",)
    assert config.uds == tmp_path / "s"  # in the folder of the file
    assert effective({}, {}, toml("memory = 5000000")).config.memory == 5_000_000


@pytest.mark.parametrize(
    ("flags", "environment", "file", "message"),
    [
        ({"page_size": "60"}, {}, "", r"page_size is 60 \(from --page-size\), must be a multiple of 64"),
        ({}, {"HEADWATER_PAGE_SIZE": "60"}, "", r"page_size is 60 \(from HEADWATER_PAGE_SIZE\)"),
        ({}, {}, "page_size = 60", r"page_size is 60 \(from .*headwater\.toml\)"),
        ({}, {"HEADWATER_PORT": "tcp://10.0.0.1"}, "", r"port is 'tcp://10\.0\.0\.1' \(from HEADWATER_PORT\).*whole"),
        ({}, {"HEADWATER_CACHE": "maybe"}, "", r"cache is 'maybe' \(from HEADWATER_CACHE\), must be true or false"),
        ({"memory": "4XB"}, {}, "", r"memory is '4XB' \(from --memory\).*4GiB"),
        ({"drain": "inf"}, {}, "", r"drain is 'inf' \(from --drain\).*seconds"),
        ({"speculation": "draft"}, {}, "", r"speculation is 'draft' \(from --speculation\), so draft_model"),
        ({}, {"HEADWATER_DEVICE": "gpu"}, "", r"device is 'gpu' \(from HEADWATER_DEVICE\), must be one of cpu, cuda"),
        ({"model": Path("/nonexistent")}, {}, "", r"model is '/nonexistent' \(from the command line\)"),
        ({"placement": "nowhere"}, {}, "", r"placement is 'nowhere' \(from --placement\).*structural"),
        ({"placement": "optimal"}, {}, "", r"it needs k, a whole number; type 'optimal\(k=8\)'"),
        ({"eviction": "clairvoyant"}, {}, "", r"eviction is 'clairvoyant' \(from --eviction\), but it .*replay"),
        ({}, {}, 'eviction = "newest"', r"eviction is 'newest' \(from .*toml\).*lru"),
        ({}, {}, "port = true", r"port is True \(from .*toml\), must be a whole number"),
        ({}, {}, "cors = [1]", r"cors is \[1\] \(from .*toml\)"),
        ({}, {}, "cache = 1", r"cache is 1 \(from .*toml\), must be true or false"),
        ({}, {}, "host = 5", r"host is 5 \(from .*toml\), must be text"),
        ({}, {}, "max-runing = 5", r"toml sets 'max-runing', which is not a setting; the nearest is 'max_running'"),
        ({}, {}, "[serve]\nport = 5", r"toml sets 'serve', which is not a setting"),
        ({}, {}, "max-running = 5\nmax_running = 5", r"toml sets 'max_running' twice"),
        ({}, {}, "port = ", r"headwater\.toml' cannot be read"),
        ({}, {}, "memory = 4GB", r"cannot be read: .* line 1, .*; sizes need quotes: memory = \"4GB\""),
        ({}, {"HEADWATER_API_KEY": " "}, "", r"api_key is empty \(from HEADWATER_API_KEY\)"),
    ],
)
def test_setting_error_names_value_source_and_allowed_values(toml, flags, environment, file, message):
    with pytest.raises(ConfigError, match=message):
        effective(flags, environment, toml(file))


def test_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="/nonexistent"):
        effective({}, {}, Path("/nonexistent"))


def test_misspelt_setting_variable_is_reported_and_foreign_ones_are_not():
    (line,) = misspelt(
        {
            "HEADWATER_MAX_RUNING": "3",
            "HEADWATER_CONFIG": "a",
            "HEADWATER_PORT": "1",
            "HEADWATER_SERVICE_HOST": "10.0.0.1",  # as Kubernetes sets them
            "HEADWATER_PORT_8000_TCP_ADDR": "10.0.0.1",
            "HOME": "/",
        }
    )
    assert "HEADWATER_MAX_RUNING" in line
    assert "HEADWATER_MAX_RUNNING" in line


def test_settings_as_toml_are_the_same_settings(toml, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    flags = {
        "model": str(tmp_path),
        "memory": "3GiB",
        "cache": False,
        "cors": "http://a.example,http://b.example",
        "uds": "hw.sock",
        "drain": "2.5",
        "model_name": 'a "name" # of ☃',
    }
    settings = effective(flags, {}, None)
    again = effective({}, {}, toml(as_toml(settings))).config
    assert again.uds == Path("hw.sock").absolute()
    assert {one.name: getattr(again, one.name) for one in SETTINGS if one.name != "uds"} == {
        one.name: getattr(settings.config, one.name) for one in SETTINGS if one.name != "uds"
    }


def test_settings_as_toml_say_where_each_is_from_and_no_secret():
    text = as_toml(effective({"page_size": "128"}, {"HEADWATER_API_KEY": "sesame"}, None))
    assert "page_size = 128  # --page-size\n" in text
    assert "port = 8000  # default\n" in text
    assert '# api_key = "***"  # HEADWATER_API_KEY\n' in text
    assert "# threads is not set: torch's own choice, within a quota of cores\n" in text
    assert "sesame" not in text
    assert "api_key" not in tomllib.loads(text)


def test_password_in_a_tiers_url_is_shown_nowhere() -> None:
    given = effective({"tier": ["redis://user:hidden@127.0.0.1:1/0,size=1GB", "disk:/tmp/a"]}, {}, None)
    assert given.config.tier[0].startswith("redis://user:hidden@")
    shown = as_toml(given)
    assert 'tier = ["redis://***@127.0.0.1:1/0,size=1GB", "disk:/tmp/a"]  # --tier\n' in shown
    assert "hidden" not in shown
    with pytest.raises(ConfigError) as error:
        effective({"tier": ["redis://user:hidden@127.0.0.1/0"], "cache": False}, {}, None)
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize("place", ["redis://:p@hidden@host/0", "redis://host/0?password=hidden,size=1GB"])
def test_no_part_of_a_password_is_shown(place: str) -> None:
    shown = without_password(place)
    assert "hidden" not in shown
    assert "host/0" in shown
