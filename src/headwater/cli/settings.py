"""Sources of settings: a flag overrides the environment, which overrides a file, which overrides the default."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Any

from headwater.cache.eviction import make_eviction
from headwater.cache.eviction.clairvoyant import Clairvoyant
from headwater.cache.placement import make_placement
from headwater.cli.models import by_name
from headwater.config import SETTINGS, ServeConfig
from headwater.errors import ConfigError
from headwater.plan import CacheLayout
from headwater.setting import FILE, MASK, NAMES, NUMBER, SECONDS, SWITCH, TIERS, Setting, SettingError, without_password

PREFIX = "HEADWATER_"
UNQUOTED_SIZE = re.compile(r"^\s*([\w-]+)\s*=\s*([\d.]+\s*[KMGT]i?B)\b", re.MULTILINE)
NAMED = {one.name: one for one in SETTINGS}
NOT_SETTINGS = ("HEADWATER_CONFIG", "HEADWATER_CACHE_DIR")  # known variables that are not settings


def _served_eviction(spelling: str) -> None:
    """Raise ConfigError for a policy that is malformed, or only for the lab."""
    if isinstance(make_eviction(spelling, CacheLayout(n_pages=1)), Clairvoyant):  # any layout detects a fault
        raise ConfigError("it needs to know the requests to come: `headwater replay` has it as a bound")


POLICIES: dict[str, Callable[[str], object]] = {"placement": make_placement, "eviction": _served_eviction}


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was written, and its source."""

    value: object
    origin: str
    folder: Path | None = None  # that relative paths start from; None: the working directory


@dataclass(frozen=True, slots=True)
class Effective:
    """The settings of one server, and the sources of those that differ from the default."""

    config: ServeConfig
    origins: Mapping[str, str]


def effective(flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None) -> Effective:
    """Combine all sources. Raises ConfigError, which names setting, value, source and allowed values."""
    given = from_all(flags, environment, file)
    origins = {name: one.origin for name, one in given.items()}
    try:
        config = ServeConfig(**values_of(given))
        check_policies(config)
    except SettingError as error:
        raise error.at(origins.get(error.name, "")) from error
    return Effective(config, origins)


def from_all(flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None) -> dict[str, Given]:
    """Read all sources, each of which overrides the ones before: file, environment, flags. Raises ConfigError."""
    return (from_file(file) if file is not None else {}) | from_environment(environment) | from_flags(flags)


def values_of(given: Mapping[str, Given]) -> dict[str, Any]:
    """Read values as settings have them. Raises SettingError for one that has not the form of its setting."""
    return {name: _read(NAMED[name], one) for name, one in given.items()}


def check_policies(config: ServeConfig) -> None:
    """Raise SettingError for a policy that is malformed, or only for the lab."""
    for name, make in POLICIES.items():
        _check_policy(name, getattr(config, name), make)


def from_flags(flags: Mapping[str, object]) -> dict[str, Given]:
    """Read the flags of a command line; None is not given."""
    given = {name: value for name, value in flags.items() if value is not None and value != []}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    return {name: Given(value, _flag(NAMED[name], value)) for name, value in plain.items()}


def from_environment(environment: Mapping[str, str]) -> dict[str, Given]:
    """Read the variables of an environment; an empty one is not set."""
    found = {name: environment.get(one.variable) for name, one in NAMED.items()}
    return {name: Given(value, NAMED[name].variable) for name, value in found.items() if value}


def from_file(path: Path) -> dict[str, Given]:
    """Read a TOML file with settings at its top level, their names with _ or -. Paths are relative to the file."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        keys = tomllib.loads(text)
    except (OSError, ValueError) as error:
        size = UNQUOTED_SIZE.search(text)
        helps = f'; sizes need quotes: {size[1]} = "{size[2]}"' if size else ""
        raise ConfigError(f"the settings of {str(path)!r} cannot be read: {error}{helps}") from error
    given: dict[str, Given] = {}
    for key, value in keys.items():
        name = key.replace("-", "_")
        if name not in NAMED:
            raise ConfigError(f"{path} sets {key!r}, which is not a setting{_nearest(name, tuple(NAMED))}")
        if name in given:
            raise ConfigError(f"{path} sets {name!r} twice, as {key!r} too")
        given[name] = Given(value, str(path), path.parent)
    return given


def misspelt(environment: Mapping[str, str]) -> list[str]:
    """Return a line for each variable whose name is close to that of a setting."""
    known = (*(one.variable for one in SETTINGS), *NOT_SETTINGS)
    unknown = (name for name in sorted(environment) if name.startswith(PREFIX) and name not in known)
    lines = {name: _nearest(name, known) for name in unknown}
    return [f"the variable {name} is not a setting{nearest}" for name, nearest in lines.items() if nearest]


def _flag(one: Setting, value: object) -> str:
    if one.name in ("model", "more_models"):
        return "the command line"
    return one.flag.replace("--", "--no-", 1) if value is False else one.flag


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(name, known, 1, 0.8 if name.startswith(PREFIX) else 0.0)
    return f"; the nearest is {near[0]!r}" if near else ""


def _read(one: Setting, given: Given) -> Any:
    value = one.read(given.value)
    if one.name == "more_models" and given.folder is not None:
        return tuple(str(given.folder / name) if (given.folder / name).exists() else name for name in value)
    path = given.folder / value if one.kind is FILE and given.folder is not None else value
    return (by_name(value) or path) if one.name == "model" and not path.exists() else path


def _check_policy(name: str, spelling: str, make: Callable[[str], object]) -> None:
    try:
        make(spelling)
    except ConfigError as error:
        raise SettingError(name, repr(spelling), f"but {error}") from error


# -- as text -------------------------------------------------------------------


def as_toml(settings: Effective) -> str:
    """Format a file for `--config` with the source of each value. Secrets are masked; unset settings are comments."""
    return "\n".join(_toml_lines(settings)) + "\n"


def _toml_lines(settings: Effective) -> Iterator[str]:
    for group, members in groupby(SETTINGS, lambda one: one.group):
        yield f"# {group}"
        for one in members:
            origin = settings.origins.get(one.name, "default")
            value = getattr(settings.config, one.name)
            if value is None:
                yield f"# {one.name} is not set: {one.unset}"
            else:
                hidden = "# " if one.secret else ""
                yield f"{hidden}{one.name} = {_toml_value(one, value)}  # {origin}"
        yield ""


def _toml_value(one: Setting, value: Any) -> str:
    if one.secret:
        return json.dumps(MASK)
    if one.kind is TIERS:
        return json.dumps([without_password(place) for place in value])
    if one.kind in (NAMES, SWITCH, NUMBER, SECONDS) or (type(value) is int and one.show(value).isdecimal()):
        return json.dumps(value)
    return json.dumps(str(value.absolute()) if isinstance(value, Path) else one.show(value), ensure_ascii=False)
