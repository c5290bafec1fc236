"""API keys of a server: one, or several in a TOML file, each with a name, a namespace of the cache, and limits."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NAME_FORM = "must have 1 to 64 letters, digits, dashes or underscores"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. A limit that is None does not exist."""

    secret: bytes = field(repr=False)
    name: str = ""  # in logs and metrics; empty: the only key of a server
    namespace: str = ""  # of the cache; empty: requests have that of their salts
    share: float = 1.0  # of the computation, in proportion to the shares of other keys
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers, cached ones included
    running: int | None = None  # requests at the same time
    until: datetime | None = None  # time at which it ends

    def namespace_of(self, salt: str) -> str:
        """Return the namespace of a request with a salt of its client's choice, which is never that of another key."""
        return "/".join(filter(None, (self.namespace, salt)))  # no namespace in a file has a slash


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _is_name(value: object) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def _is_share(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


COUNT = _is_count, "must be a whole number above 0"
FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "key": (lambda value: isinstance(value, str) and bool(value.strip()), "must be a text that cannot be guessed"),
    "namespace": (_is_name, NAME_FORM),
    "share": (_is_share, "must be a number above 0"),
    "requests_per_minute": COUNT,
    "tokens_per_minute": COUNT,
    "running": COUNT,
    "until": (lambda value: isinstance(value, date), "must be a date or a time, such as 2027-01-31, without quotes"),
}


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read several keys from a file whose name ends in .toml, the only one from any other.

    Raises OSError or ValueError, whose message has the line and never a key.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".toml":
        if not text.strip():
            raise ValueError("it is empty: a key is needed")
        return (ApiKey(text.strip().encode()),)
    keys = tuple(_parsed(text))
    if not keys:
        raise ValueError("it has no key: a line [NAME] and a line key = TEXT are needed")
    for number, one in enumerate(keys):
        for other in keys[:number]:
            if one.secret == other.secret:
                raise ValueError(f"line {_line(text, one.name, 'key')}: [{one.name}] has the key of [{other.name}]")
    return keys


def _parsed(text: str) -> Iterator[ApiKey]:
    for name, given in tomllib.loads(text).items():
        if not isinstance(given, dict):
            raise ValueError(f"line {_line(text, '', name)}: {name!r} is not in a table: a line [NAME] comes before")
        if not NAME.fullmatch(name):
            raise ValueError(f"line {_line(text, name)}: the name of a key is {name!r}, it {NAME_FORM}")
        for key, value in given.items():
            where = f"line {_line(text, name, key)}: [{name}]"
            if key not in FIELDS:
                raise ValueError(f"{where} sets {key!r}, which is none of {', '.join(FIELDS)}")
            is_valid, must = FIELDS[key]
            if not is_valid(value):
                raise ValueError(f"{where} {key} {must}" if key == "key" else f"{where} {key} is {value!r}, {must}")
        if "key" not in given:
            raise ValueError(f"line {_line(text, name)}: [{name}] has no key")
        yield _key(name, **given)


def _key(name: str, key: str, namespace: str | None = None, until: date | None = None, **limits: Any) -> ApiKey:
    """Return a key whose fields are valid. A date ends with its day in UTC, and a time without a zone is in UTC."""
    end = until
    if end is not None and not isinstance(end, datetime):
        end = datetime.combine(end + timedelta(days=1), time(), UTC)
    elif end is not None and end.tzinfo is None:
        end = end.replace(tzinfo=UTC)
    return ApiKey(key.strip().encode(), name, namespace or name, until=end, **limits)


def _line(text: str, table: str, name: str = "") -> int:
    """Return the number of the line with a table's field, or with the table's head if there is no such line."""
    found, within = 1, not table
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("["):
            within = line.partition("#")[0].strip(" \t[]\"'") == table
            found = number if within else found
        elif within and line.partition("=")[0].strip(" \t\"'") == name:
            return number
    return found
