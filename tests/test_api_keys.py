"""API keys in a TOML file: fields, defaults, and errors with line and reason, none of which holds a key."""

import re
from dataclasses import fields
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from headwater.api_keys import ApiKey, read_keys
from headwater.config import ServeConfig
from headwater.errors import ConfigError

WHOLE = """\
# two colleagues and a program
[ann]
key = "secret of ann"

[bob]
key = "secret of bob"
namespace = "team"
share = 2
requests_per_minute = 60
tokens_per_minute = 100_000
running = 4
until = 2027-01-31
"""


@pytest.fixture
def written(tmp_path):
    def write(text, name="keys.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_key_by_default_has_its_name_as_namespace(written):
    ann, bob = read_keys(written(WHOLE))
    assert ann == ApiKey(b"secret of ann", "ann", "ann")
    end = datetime(2027, 2, 1, tzinfo=UTC)
    assert bob == ApiKey(b"secret of bob", "bob", "team", 2, 60, 100_000, 4, end)
    assert "secret" not in repr((ann, bob))


@pytest.mark.parametrize(
    ("until", "end"),
    [
        ("2027-01-31", datetime(2027, 2, 1, tzinfo=UTC)),
        ("2027-01-31T12:00:00", datetime(2027, 1, 31, 12, tzinfo=UTC)),
        ("2027-01-31T12:00:00+02:00", datetime(2027, 1, 31, 12, tzinfo=timezone(timedelta(hours=2)))),
    ],
)
def test_end_is_the_end_of_a_day_or_a_time_in_utc(written, until, end):
    assert read_keys(written(f"[ann]\nkey = 'k'\nuntil = {until}\n"))[0].until == end


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "it has no key"),
        ("[ann]\nkey = 'k'\nshare = \n", "at line 3"),
        ("# comment\n[ann]\nshare = 1\n", r"line 2: \[ann\] has no key"),
        ("[ann]\nkey = ''\n", r"line 2: \[ann\] key must be a text"),
        ("[ann]\nkey = 7134\n", r"line 2: \[ann\] key must be a text"),
        ("[ann]\nkey = 'k'\n\n[bob]\nkey = 'l'\nshare = 0\n", r"line 6: \[bob\] share is 0, must be a number above 0"),
        ("[ann]\nkey = 'k'\nshare = inf\n", "line 3: .* share is inf"),
        ("[ann]\nkey = 'k'\nrunning = 2.5\n", r"line 3: \[ann\] running is 2.5, must be a whole number above 0"),
        ("[ann]\nkey = 'k'\nrunning = true\n", "line 3: .* running is True"),
        ("[ann]\nkey = 'k'\nrequests = 5\n", r"line 3: \[ann\] sets 'requests', which is none of key, namespace"),
        ("[ann]\nkey = 'k'\nuntil = '2027-01-31'\n", "line 3: .* until is '2027-01-31', must be a date"),
        ("[ann]\nkey = 'k'\nnamespace = 'a/b'\n", "line 3: .* namespace is 'a/b', must have 1 to 64 letters"),
        ("\n['ann smith']\nkey = 'k'\n", "line 2: the name of a key is 'ann smith'"),
        ("\nkey = 'k'\n", r"line 2: 'key' is not in a table"),
        ("[ann]\nkey = 'k'\n[bob]\n key='k'\n", r"line 4: \[bob\] has the key of \[ann\]"),
    ],
)
def test_fault_in_a_file_is_an_error_with_its_line(written, text, fault):
    path = written(text)
    with pytest.raises(ValueError, match=fault) as raised:
        read_keys(path)
    assert "7134" not in str(raised.value)
    with pytest.raises(ConfigError, match=rf"api_key_file is .*keys.toml', which cannot be read: .*{fault}"):
        ServeConfig(api_key_file=path)


def test_example_of_the_settings_page_is_valid(written):
    page = (Path(__file__).parents[1] / "docs" / "settings.md").read_text()
    (text,) = re.findall(r"```toml\n(# /etc/headwater/keys.toml\n.*?)```", page, re.S)
    (ann,) = read_keys(written(text))
    assert {field.name for field in fields(ApiKey) if getattr(ann, field.name) is None} == set()


def test_salt_of_a_client_stays_within_the_namespace_of_its_key():
    ann, anonymous = ApiKey(b"k", "ann", "ann"), ApiKey(b"k")
    assert [ann.namespace_of(salt) for salt in ("", "bob", "/bob")] == ["ann", "ann/bob", "ann//bob"]
    assert [anonymous.namespace_of(salt) for salt in ("", "bob")] == ["", "bob"]
